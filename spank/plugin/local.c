/* srun: the prolog of a node that this step is the first on learns from here where the job's directory is. */
#include "plugin.h"

#include <stdlib.h>

static int set(spank_t spank, const char *name, const char *value)
{
    return spank_job_control_setenv(spank, name, value, 1);
}

int local_init_post_opt(spank_t spank)
{
    const char *job_dir = getenv(VARIABLE_JOB_DIR);
    if (job_dir)
        set(spank, VARIABLE_JOB_DIR, job_dir);
    options_to(spank, set);
    return ESPANK_SUCCESS;
}
