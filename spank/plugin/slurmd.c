/* slurmd itself: it stops in an orderly way. */
#include "plugin.h"

#include <stdio.h>
#include <unistd.h>

int slurmd_exit_context(spank_t spank)
{
    char node[NODE_NAME_MAX], fact[32];
    (void)spank;
    node_name(node, sizeof node);
    snprintf(fact, sizeof fact, "%ld", (long)getpid());
    if (is_plain_name(node))
        tell_all_jobs(node, &(struct event){"node_stop", fact, "slurmd stops"});
    return ESPANK_SUCCESS;
}
