/* Where a job's directory is: what the plugin has noted on this node, and what the user's own tm_slurm has noted
 * below the home directory (tm_slurm/submit/registry.py). */
#include "notify.h"

#include <dirent.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static bool read_registration(int folder, const char *name, struct request *filled, char *job_dir)
{
    char text[PATH_MAX + 64];
    unsigned uid, gid, restart;
    int rest = 0;
    struct stat found;
    int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0)
        return false;
    ssize_t length = read(file, text, sizeof text - 1);
    bool ours = fstat(file, &found) == 0 && found.st_uid == geteuid() && !(found.st_mode & 022);
    close(file);
    if (length <= 0 || !ours)
        return false;
    text[length] = '\0';
    if (sscanf(text, "%u %u %u\n%n", &uid, &gid, &restart, &rest) != 3 || text[rest] != '/')
        return false;
    text[rest + (int)strcspn(text + rest, "\n")] = '\0';
    if (strlen(text + rest) >= PATH_MAX)
        return false;
    filled->uid = uid, filled->has_uid = true;
    filled->gid = gid, filled->has_gid = true;
    filled->restart = restart;
    memcpy(job_dir, text + rest, strlen(text + rest) + 1);
    return true;
}

static int open_folder(const struct request *request)
{
    char path[PATH_MAX];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", request->state, request->node) >= sizeof path)
        return -1;
    return open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* Only of a job of the user that is asked for: ids begin anew on another cluster. */
bool registered_place(const struct request *request, uint32_t job, struct request *filled, char *job_dir)
{
    char name[32], ended[48];
    int folder = open_folder(request);
    if (folder < 0)
        return false;
    snprintf(name, sizeof name, "%u", job);
    snprintf(ended, sizeof ended, "%u.ended", job);
    bool found = read_registration(folder, name, filled, job_dir) || read_registration(folder, ended, filled, job_dir);
    close(folder);
    return found && (!request->has_uid || filled->uid == request->uid);
}

/* Has to be called with the rights of the user. */
bool user_place(const struct request *request, char *job_dir)
{
    char cluster[512], link[PATH_MAX];
    struct passwd *account = getpwuid(request->uid);
    cluster_identity(cluster, sizeof cluster);
    if (!account || (size_t)snprintf(link, sizeof link, "%s/.local/state/tm_slurm/jobs/%s/%u", account->pw_dir, cluster,
                                     request->job) >= sizeof link)
        return false;
    ssize_t length = readlink(link, job_dir, PATH_MAX - 1);
    if (length <= 0 || job_dir[0] != '/')
        return false;
    job_dir[length] = '\0';
    return true;
}

/* `tell` runs for every job in a process of its own: it gives up its rights. Returns the worst exit code. */
int for_each_registered(const struct request *request, int (*tell)(const struct request *))
{
    int worst = 0, status, folder = open_folder(request);
    DIR *entries = folder < 0 ? NULL : fdopendir(folder);
    struct dirent *entry;
    while (entries && (entry = readdir(entries))) {
        size_t digits = strspn(entry->d_name, "0123456789");
        if (digits == 0 || digits > 10 || entry->d_name[digits] != '\0')
            continue;
        pid_t child = fork();
        if (child == 0) {
            struct request one = *request;
            one.job = (uint32_t)strtoul(entry->d_name, NULL, 10);
            deadline_set(request->limit_ms);
            _exit(tell(&one));
        }
    }
    while (wait(&status) > 0)
        if (!WIFEXITED(status) || WEXITSTATUS(status) > worst)
            worst = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (entries)
        closedir(entries);
    else if (folder >= 0)
        close(folder);
    return worst;
}
