/* What test_plugin decides about Slurm's side, and what the plugin has done to it. */
#ifndef TM_SLURM_SPANK_SIDE_H
#define TM_SLURM_SPANK_SIDE_H

#include <slurm/spank.h>
#include <stdbool.h>
#include <stdint.h>

struct side {
    spank_context_t context;
    int major, minor, status, variables, registered;
    uint32_t step, task;
    bool broken;
    const char *names[32];
    char values[32][8192];
    struct spank_option *options[8];
    char said[512];
};

extern struct side side;

void side_variable(const char *name, const char *value);

#endif
