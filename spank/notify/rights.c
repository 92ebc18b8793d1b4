/* Everything below a job's directory is read with the rights of the job's user: what that user has put there leads
 * nowhere that the user could not go, and a file system that lets root in nowhere lets this in. */
#include "notify.h"

#include <grp.h>
#include <pwd.h>
#include <sys/prctl.h>
#include <unistd.h>

bool become_user(const struct request *request)
{
    if (geteuid() != 0)
        return geteuid() == request->uid && getuid() == request->uid;
    if (request->uid == 0)
        return true;
    struct passwd *account = getpwuid(request->uid);
    if (!account && !request->has_gid)
        return false;
    gid_t gid = request->has_gid ? request->gid : account->pw_gid;
    if (account ? initgroups(account->pw_name, gid) != 0 : setgroups(0, NULL) != 0)
        return false;
    if (setresgid(gid, gid, gid) != 0 || setresuid(request->uid, request->uid, request->uid) != 0)
        return false;
    prctl(PR_SET_DUMPABLE, 0);
    return geteuid() == request->uid && setuid(0) != 0;
}
