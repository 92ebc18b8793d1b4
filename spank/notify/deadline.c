/* One limit for all that is done; and for what cannot be given a limit (a file system that hangs), a signal. */
#include "notify.h"

#include <signal.h>
#include <sys/time.h>
#include <time.h>

enum { GRACE_MS = 20 };

static struct timespec until;

void deadline_set(int limit_ms)
{
    sigset_t none;
    int last_ms = limit_ms + GRACE_MS;
    struct itimerval last = {.it_value = {last_ms / 1000, (last_ms % 1000) * 1000}};
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += limit_ms / 1000;
    until.tv_nsec += (limit_ms % 1000) * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGALRM, SIG_DFL);
    signal(SIGPIPE, SIG_IGN);
    setitimer(ITIMER_REAL, &last, NULL);
}

int deadline_left_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long long left = (until.tv_sec - now.tv_sec) * 1000LL + (until.tv_nsec - now.tv_nsec) / 1000000LL;
    return left > 0 ? (int)left : 0;
}

void pause_ms(int ms)
{
    int left = deadline_left_ms();
    ms = ms < left ? ms : left;
    nanosleep(&(struct timespec){ms / 1000, (ms % 1000) * 1000000L}, NULL);
}
