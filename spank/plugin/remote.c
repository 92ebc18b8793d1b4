/* slurmstepd: which job this is, and that a task or the step has ended. */
#include "plugin.h"

#include <slurm/slurm.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

enum { MOST_TASKS_TOLD = 64 };

static struct {
    bool is_told;
    uint32_t step;
    unsigned tasks_told;
    char node[NODE_NAME_MAX];
    struct job job;
} here;

static int set(spank_t spank, const char *name, const char *value)
{
    return spank_setenv(spank, name, value, 1);
}

static bool is_off(spank_t spank)
{
    char said[4];
    return options.off || spank_getenv(spank, VARIABLE_OFF, said, sizeof said) == ESPANK_SUCCESS;
}

static bool identify(spank_t spank)
{
    struct job *job = &here.job;
    if (spank_get_item(spank, S_JOB_ID, &job->id) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_STEPID, &here.step) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_UID, &job->uid) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_GID, &job->gid) != ESPANK_SUCCESS)
        return false;
    if (spank_get_item(spank, S_SLURM_RESTART_COUNT, &job->restart) != ESPANK_SUCCESS)
        job->restart = 0;
    if (spank_getenv(spank, "SLURMD_NODENAME", here.node, sizeof here.node) != ESPANK_SUCCESS)
        node_name(here.node, sizeof here.node);
    return is_plain_name(here.node);
}

/* Runs as root, before the job's own rights are taken. */
int remote_init_post_opt(spank_t spank)
{
    char job_dir[PATH_MAX];
    memset(&here, 0, sizeof here);
    if (is_off(spank) || !identify(spank))
        return ESPANK_SUCCESS;
    here.is_told = true;
    if (spank_getenv(spank, VARIABLE_JOB_DIR, job_dir, sizeof job_dir) == ESPANK_SUCCESS && job_dir[0] == '/') {
        snprintf(here.job.job_dir, sizeof here.job.job_dir, "%s", job_dir);
        if (!registration_write(here.node, &here.job))
            slurm_debug("tm_slurm: job %u cannot be noted in %s", here.job.id, settings.state);
    }
    return ESPANK_SUCCESS;
}

int remote_user_init(spank_t spank)
{
    options_to(spank, set);
    return ESPANK_SUCCESS;
}

/* The batch script says where the directory is only after it has begun: its step learns it from the agent's. */
static bool has_coordinator(void)
{
    struct job found;
    if (!here.is_told)
        return false;
    if (here.job.job_dir[0])
        return true;
    if (!registration_read(here.node, here.job.id, &found) || found.uid != here.job.uid)
        return false;
    memcpy(here.job.job_dir, found.job_dir, sizeof here.job.job_dir);
    return true;
}

static void name_step(char *name, size_t size)
{
    if (here.step == SLURM_BATCH_SCRIPT)
        snprintf(name, size, "batch");
    else if (here.step > SLURM_BATCH_SCRIPT - 16)
        snprintf(name, size, "special-%u", here.step - (SLURM_BATCH_SCRIPT - 16));
    else
        snprintf(name, size, "%u", here.step);
}

static void describe(int status, char *text, size_t size)
{
    if (WIFSIGNALED(status))
        snprintf(text, size, "was killed by signal %d", WTERMSIG(status));
    else
        snprintf(text, size, "ended with exit code %d", WEXITSTATUS(status));
}

int remote_task_exit(spank_t spank)
{
    uint32_t task = 0;
    int status = 0;
    char step[32], how[64], fact[64], reason[160];
    if (!has_coordinator() || here.tasks_told >= MOST_TASKS_TOLD)
        return ESPANK_SUCCESS;
    if (spank_get_item(spank, S_TASK_GLOBAL_ID, &task) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_TASK_EXIT_STATUS, &status) != ESPANK_SUCCESS)
        return ESPANK_SUCCESS;
    here.tasks_told++;
    name_step(step, sizeof step);
    describe(status, how, sizeof how);
    snprintf(fact, sizeof fact, "%s.%u", step, task);
    snprintf(reason, sizeof reason, "task %u of step %s %s", task, step, how);
    tell(here.node, &here.job, &(struct event){"task_exit", fact, reason});
    return ESPANK_SUCCESS;
}

int remote_exit(spank_t spank)
{
    char step[32], reason[80];
    (void)spank;
    if (!has_coordinator())
        return ESPANK_SUCCESS;
    name_step(step, sizeof step);
    snprintf(reason, sizeof reason, "step %s ended", step);
    tell(here.node, &here.job, &(struct event){"step_end", step, reason});
    return ESPANK_SUCCESS;
}
