/* Starts tm-notify, which signs and sends, as a process of its own that nobody here waits for: whatever happens to
 * it (a coordinator that is frozen, a file system that hangs) happens to it alone. */
#include "plugin.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_WORDS = 32 };

/* Where Slurm's configuration is, if that is said: by it tm-notify tells clusters apart. */
static char slurm_conf[PATH_MAX + 16];

/* Only what may be called between fork and exec in a process with threads. */
static void run(char *const *words)
{
    char *const environment[] = {"PATH=/usr/bin:/bin", "LC_ALL=C", slurm_conf[0] ? slurm_conf : NULL, NULL};
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int number = 1; number < 32; number++)
        signal(number, SIG_DFL);
    int nothing = open("/dev/null", O_RDWR);
    if (nothing >= 0) {
        dup2(nothing, 0);
        dup2(nothing, 1);
        dup2(nothing, 2);
    }
    if (chdir("/") == 0)
        execve(words[0], words, environment);
    _exit(127);
}

static long elapsed_ms(const struct timespec *since)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (now.tv_sec - since->tv_sec) * 1000 + (now.tv_nsec - since->tv_nsec) / 1000000;
}

/* Not our child: whoever waits for children here (slurmstepd does) never hears of it. */
static void start(char *const *words)
{
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    pid_t child = fork();
    if (child == 0) {
        setsid();
        pid_t grandchild = fork();
        if (grandchild == 0)
            run(words);
        _exit(0);
    }
    if (child < 0) {
        slurm_debug("tm_slurm: fork: errno %d", errno);
        return;
    }
    while (waitpid(child, NULL, WNOHANG) == 0 && elapsed_ms(&began) < LIMIT_MS)
        nanosleep(&(struct timespec){0, 100000}, NULL);
}

static void tell_with(const char *node, const struct job *job, const struct event *event)
{
    char id[16], restart[16], uid[16], gid[16], at[40];
    struct timespec now;
    char *words[MOST_WORDS];
    int count = 0;
    const char *named = getenv("SLURM_CONF");
    if (named && (size_t)snprintf(slurm_conf, sizeof slurm_conf, "SLURM_CONF=%s", named) >= sizeof slurm_conf)
        slurm_conf[0] = '\0';
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(at, sizeof at, "%lld.%06ld", (long long)now.tv_sec, now.tv_nsec / 1000);
#define WORD(text) words[count++] = (char *)(text)
    WORD(settings.notify);
    WORD("--state"), WORD(settings.state);
    WORD("--node"), WORD(node);
    WORD("--kind"), WORD(event->kind);
    WORD("--source"), WORD("spank");
    WORD("--fact"), WORD(event->fact);
    WORD("--reason"), WORD(event->reason);
    WORD("--at"), WORD(at);
    if (!job) {
        WORD("--all-jobs");
    } else {
        snprintf(id, sizeof id, "%u", job->id);
        snprintf(restart, sizeof restart, "%u", job->restart);
        snprintf(uid, sizeof uid, "%u", (unsigned)job->uid);
        snprintf(gid, sizeof gid, "%u", (unsigned)job->gid);
        WORD("--job"), WORD(id);
        WORD("--restart"), WORD(restart);
        WORD("--uid"), WORD(uid);
        if (job->gid != (gid_t)-1)
            WORD("--gid"), WORD(gid);
        if (job->job_dir[0])
            WORD("--job-dir"), WORD(job->job_dir);
    }
#undef WORD
    words[count] = NULL;
    start(words);
}

void tell(const char *node, const struct job *job, const struct event *event)
{
    tell_with(node, job, event);
}

void tell_all_jobs(const char *node, const struct event *event)
{
    tell_with(node, NULL, event);
}
