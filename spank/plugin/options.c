/* The options on sbatch, srun and salloc: refused where they are typed, and passed on as variables. */
#include "plugin.h"
#include "policies.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STANDBYS, POLICY, LEAD, OFF };
enum { MOST_STANDBYS = 65535, MOST_MINUTES = 7 * 24 * 60 };

bool options_check_count(const char *text, long least, long most)
{
    size_t length = text ? strlen(text) : 0;
    if (length == 0 || length > 9 || strspn(text, "0123456789") != length)
        return false;
    long number = strtol(text, NULL, 10);
    return number >= least && number <= most;
}

static bool is_policy(const char *word, size_t length)
{
    for (size_t i = 0; i < sizeof POLICIES / sizeof *POLICIES; i++)
        if (strlen(POLICIES[i]) == length && strncmp(POLICIES[i], word, length) == 0)
            return true;
    return false;
}

/* Policies with commas in between, none twice. */
bool options_check_policy(const char *text)
{
    if (!text || strlen(text) >= sizeof options.policy)
        return false;
    for (const char *word = text;; word++) {
        size_t length = strcspn(word, ",");
        if (!is_policy(word, length))
            return false;
        for (const char *earlier = text; earlier < word; earlier += strcspn(earlier, ",") + 1)
            if (strcspn(earlier, ",") == length && strncmp(earlier, word, length) == 0)
                return false;
        word += length;
        if (*word == '\0')
            return true;
    }
}

/* slurmstepd hears what sbatch or srun has let pass: there a wrong value is left out, and fails nothing. */
static int refused(int remote, const char *option, const char *expected, const char *found)
{
    if (remote)
        return ESPANK_SUCCESS;
    slurm_spank_log("tm_slurm: %s: expected %s, found '%.100s'", option, expected, found ? found : "");
    return ESPANK_BAD_ARG;
}

static int take(int which, const char *given, int remote)
{
    switch (which) {
    case STANDBYS:
        if (!options_check_count(given, 0, MOST_STANDBYS))
            return refused(remote, "--tm-standbys", "a number of nodes from 0 to 65535", given);
        snprintf(options.standbys, sizeof options.standbys, "%s", given);
        break;
    case POLICY:
        if (!options_check_policy(given))
            return refused(remote, "--tm-policy", "some of " POLICY_LIST " with commas in between, none twice",
                           given);
        snprintf(options.policy, sizeof options.policy, "%s", given);
        break;
    case LEAD:
        if (!options_check_count(given, 1, MOST_MINUTES))
            return refused(remote, "--tm-lead", "minutes from 1 to 10080", given);
        snprintf(options.lead, sizeof options.lead, "%s", given);
        break;
    default:
        options.off = true;
    }
    return ESPANK_SUCCESS;
}

static struct spank_option table[] = {
    {"tm-standbys", "N", "tm_slurm: hold N of the job's nodes in reserve, warmed up", 1, STANDBYS, take},
    {"tm-policy", "LIST", "tm_slurm: what to do without a standby: " POLICY_LIST, 1, POLICY, take},
    {"tm-lead", "MINUTES", "tm_slurm: leave nodes so long before their maintenance window", 1, LEAD, take},
    {"tm-off", NULL, "tm_slurm: tell nothing about this job", 0, OFF, take},
};

void options_register(spank_t spank)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        spank_err_t error = spank_option_register(spank, &table[i]);
        if (error != ESPANK_SUCCESS)
            slurm_error("tm_slurm: --%s cannot be registered: %s", table[i].name, spank_strerror(error));
    }
}

/* Have `set` take each value that the user has given. */
void options_to(spank_t spank, int (*set)(spank_t, const char *, const char *))
{
    if (options.standbys[0])
        set(spank, "TM_SLURM_STANDBYS", options.standbys);
    if (options.policy[0])
        set(spank, "TM_SLURM_POLICY", options.policy);
    if (options.lead[0])
        set(spank, "TM_SLURM_LEAD_MINUTES", options.lead);
    if (options.off)
        set(spank, VARIABLE_OFF, "1");
}
