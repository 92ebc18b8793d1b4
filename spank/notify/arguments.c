/* The command line. */
#include "notify.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STATE = 256, NODE, KIND, SOURCE, FACT, REASON, AT, JOB, RESTART, UID, GID, JOB_DIR, ALL_JOBS, DETACH, LIMIT };

static const struct option names[] = {
    {"state", required_argument, NULL, STATE},     {"node", required_argument, NULL, NODE},
    {"kind", required_argument, NULL, KIND},       {"source", required_argument, NULL, SOURCE},
    {"fact", required_argument, NULL, FACT},       {"reason", required_argument, NULL, REASON},
    {"at", required_argument, NULL, AT},           {"job", required_argument, NULL, JOB},
    {"restart", required_argument, NULL, RESTART}, {"uid", required_argument, NULL, UID},
    {"gid", required_argument, NULL, GID},         {"job-dir", required_argument, NULL, JOB_DIR},
    {"all-jobs", no_argument, NULL, ALL_JOBS},     {"detach", no_argument, NULL, DETACH},
    {"limit-ms", required_argument, NULL, LIMIT},  {NULL, 0, NULL, 0},
};

static bool wrong(const char *option, const char *expected, const char *found)
{
    fprintf(stderr, "tm-notify: --%s: expected %s, found '%.100s'\n", option, expected, found);
    return false;
}

static bool is_name(const char *text)
{
    size_t length = strlen(text);
    return length > 0 && length <= NAME_MAX_BYTES && text[0] != '.' && text[0] != '-' &&
           strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == length;
}

static bool is_number(const char *text, unsigned long long most, unsigned long long *number)
{
    size_t length = strlen(text);
    if (length == 0 || length > 10 || strspn(text, "0123456789") != length)
        return false;
    *number = strtoull(text, NULL, 10);
    return *number <= most;
}

static bool take(int which, char *given, struct request *request)
{
    unsigned long long number = 0;
    char *end = NULL;
    switch (which) {
    case STATE:
    case JOB_DIR:
        if (given[0] != '/' || strlen(given) >= PATH_MAX - 64)
            return wrong(which == STATE ? "state" : "job-dir", "an absolute path", given);
        *(which == STATE ? &request->state : &request->job_dir) = given;
        return true;
    case NODE:
        request->node = given;
        return is_name(given) || wrong("node", "a node's name", given);
    case KIND:
        request->kind = given;
        return is_name(given) || wrong("kind", "a kind of event, such as down", given);
    case SOURCE:
        request->source = given;
        return is_name(given) || wrong("source", "spank, prolog, epilog or strigger", given);
    case FACT:
        request->fact = given;
        return given[0] == '\0' || is_name(given) || wrong("fact", "letters, digits, '.', '_' and '-'", given);
    case REASON:
        snprintf(request->reason, sizeof request->reason, "%.*s", REASON_MAX, given);
        return true;
    case AT:
        errno = 0;
        request->at = strtod(given, &end);
        request->has_at = true;
        return (errno == 0 && end != given && *end == '\0' && request->at > 0 && request->at < 1e11) ||
               wrong("at", "Unix seconds", given);
    case JOB:
        request->has_job = true;
        if (!is_number(given, UINT32_MAX, &number))
            return wrong("job", "a job id", given);
        request->job = (uint32_t)number;
        return true;
    case RESTART:
        if (!is_number(given, UINT32_MAX, &number))
            return wrong("restart", "how often Slurm has restarted the job", given);
        request->restart = (uint32_t)number;
        return true;
    case UID:
    case GID:
        if (!is_number(given, UINT32_MAX - 1, &number))
            return wrong(which == UID ? "uid" : "gid", "a number", given);
        if (which == UID)
            request->uid = (uid_t)number, request->has_uid = true;
        else
            request->gid = (gid_t)number, request->has_gid = true;
        return true;
    case ALL_JOBS:
        request->all_jobs = true;
        return true;
    case DETACH:
        request->detach = true;
        return true;
    case LIMIT:
        if (!is_number(given, 60000, &number) || number == 0)
            return wrong("limit-ms", "milliseconds from 1 to 60000", given);
        request->limit_ms = (int)number;
        return true;
    default:
        fputs("tm-notify: expected --node --kind --source, and --job --uid or --all-jobs; see README.md\n", stderr);
        return false;
    }
}

bool arguments_read(int count, char **words, struct request *request)
{
    int which;
    *request = (struct request){.state = TM_STATE, .fact = "", .limit_ms = 250};
    opterr = 0;
    while ((which = getopt_long(count, words, "", names, NULL)) != -1)
        if (!take(which, optarg, request))
            return false;
    if (optind != count)
        return wrong("?", "options only", words[optind]);
    if (!request->node || !request->kind || !request->source || request->all_jobs == request->has_job ||
        (request->has_job && !request->has_uid))
        return take('?', NULL, request);
    return true;
}
