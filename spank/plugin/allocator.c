/* sbatch and salloc: what was asked goes into the environment of what they start, and on to prolog and epilog. */
#include "plugin.h"

#include <stdlib.h>

static int set(spank_t spank, const char *name, const char *value)
{
    setenv(name, value, 1);
    return spank_job_control_setenv(spank, name, value, 1);
}

int allocator_init_post_opt(spank_t spank)
{
    options_to(spank, set);
    return ESPANK_SUCCESS;
}
