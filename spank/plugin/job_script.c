/* Prolog and epilog: the job comes to this node, and leaves it. There is no job environment here. */
#include "plugin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool read_number(const char *name, const char *older, uint32_t *number)
{
    const char *text = getenv(name) ? getenv(name) : getenv(older);
    if (!text || !options_check_count(text, 0, INT32_MAX))
        return false;
    *number = (uint32_t)strtoul(text, NULL, 10);
    return true;
}

/* Slurm gives what spank_job_control_setenv has set to prolog and epilog as variables with this prefix. Here the
 * function that would read them is not to be called: in Slurm 22.05 it crashes. */
static bool identify(char *node, size_t size, struct job *job)
{
    const char *job_dir = getenv("SPANK_" VARIABLE_JOB_DIR);
    uint32_t uid = 0;
    memset(job, 0, sizeof *job);
    node_name(node, size);
    if (!is_plain_name(node) || !read_number("SLURM_JOB_ID", "SLURM_JOBID", &job->id) ||
        !read_number("SLURM_JOB_UID", "SLURM_UID", &uid))
        return false;
    if (getenv("SPANK_" VARIABLE_OFF))
        return false;
    job->uid = uid;
    job->gid = (gid_t)-1;
    if (!read_number("SLURM_RESTART_COUNT", "SLURM_RESTART_COUNT", &job->restart))
        job->restart = 0;
    if (job_dir && job_dir[0] == '/' && strlen(job_dir) < sizeof job->job_dir)
        memcpy(job->job_dir, job_dir, strlen(job_dir) + 1);
    return true;
}

int job_script_prolog(spank_t spank)
{
    char node[NODE_NAME_MAX];
    struct job job;
    (void)spank;
    if (identify(node, sizeof node, &job))
        tell(node, &job, &(struct event){"node_join", "", "the job comes to this node"});
    return ESPANK_SUCCESS;
}

int job_script_epilog(spank_t spank)
{
    char node[NODE_NAME_MAX];
    struct job job, found;
    (void)spank;
    if (!identify(node, sizeof node, &job))
        return ESPANK_SUCCESS;
    if (registration_read(node, job.id, &found) && found.uid == job.uid)
        job = found;
    tell(node, &job, &(struct event){"node_leave", "", "the job has left this node"});
    registration_end(node, job.id);
    return ESPANK_SUCCESS;
}
