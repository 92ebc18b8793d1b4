/* tm-notify: root's word to the coordinator of a user's job. Exit code 0 delivered, 1 not delivered, 2 misused. */
#include "notify.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { AGAIN_MS = 10, PRIORITY = -10 };

static int not_delivered(const char *why, const char *where)
{
    fprintf(stderr, "tm-notify: not delivered: %s %s\n", why, where);
    return 1;
}

/* Until it is delivered or refused, or the time is over: the leader may be changing just now. */
static int tell_at(const struct request *request, const char *job_dir)
{
    unsigned char secret[SECRET_MAX], frame[FRAME_MAX + 4];
    size_t secret_length = 0;
    struct leader leader;
    enum outcome outcome = UNREACHABLE;
    int directory = open(job_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0)
        return not_delivered("there is no job directory", job_dir);
    if (!secret_read(directory, request->uid, secret, &secret_length)) {
        close(directory);
        return not_delivered("the job's secret cannot be read, or is not its user's alone:", job_dir);
    }
    while (outcome == UNREACHABLE && deadline_left_ms() > 0) {
        size_t length = 0;
        if (leader_read(directory, &leader))
            length = message_make(request, &leader, secret, secret_length, frame);
        if (length > 0)
            outcome = deliver(&leader, frame, length);
        if (outcome == UNREACHABLE)
            pause_ms(AGAIN_MS);
    }
    OPENSSL_cleanse(secret, sizeof secret);
    close(directory);
    if (outcome == UNREACHABLE)
        return not_delivered("no coordinator answered in time, by", job_dir);
    return outcome == DELIVERED ? 0 : 1;
}

static int tell(const struct request *given)
{
    static char found[PATH_MAX];
    struct request request = *given;
    const char *job_dir = request.job_dir;
    if (!job_dir && registered_place(given, request.job, &request, found))
        job_dir = found;
    if (!request.has_uid || !become_user(&request))
        return not_delivered("only root, or the job's user, can tell of", "a job");
    if (!job_dir && user_place(&request, found))
        job_dir = found;
    if (!job_dir)
        return not_delivered("no directory is known of this job:", "it is none of tm_slurm");
    return tell_at(&request, job_dir);
}

/*
 * Goes on as a process of its own session. The caller is let go only then: slurmd ends the process group of a prolog
 * that has returned.
 */
static bool detach(void)
{
    int session[2];
    char none;
    if (pipe(session) < 0)
        return false;
    pid_t child = fork();
    if (child != 0) {
        close(session[1]);
        while (read(session[0], &none, 1) < 0 && errno == EINTR)
            ;
        _exit(child < 0 ? 1 : 0);
    }
    bool own = setsid() >= 0;
    close(session[0]);
    close(session[1]);
    int nothing = open("/dev/null", O_RDWR);
    return own && nothing >= 0 && dup2(nothing, 0) == 0 && dup2(nothing, 1) == 1 && dup2(nothing, 2) == 2;
}

int main(int count, char **words)
{
    struct request request;
    struct timespec now;
    close_range(3, ~0U, 0);
    setpriority(PRIO_PROCESS, 0, PRIORITY); /* ranks keep all cores busy; does nothing if we may not */
    if (!arguments_read(count, words, &request))
        return 2;
    if (!request.has_at) {
        clock_gettime(CLOCK_REALTIME, &now);
        request.at = (double)now.tv_sec + (double)now.tv_nsec / 1e9;
    }
    if (request.detach && !detach())
        return 1;
    OPENSSL_init_crypto(OPENSSL_INIT_NO_LOAD_CONFIG, NULL);
    if (request.all_jobs)
        return for_each_registered(&request, tell);
    deadline_set(request.limit_ms);
    return tell(&request);
}
