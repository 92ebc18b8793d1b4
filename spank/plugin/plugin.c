/* The dispatch: Slurm calls, the context decides which file answers. */
#include "plugin.h"

#include "build.h"

#include <slurm/slurm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef TM_NOTIFY
#error "TM_NOTIFY: expected the path of tm-notify (see the Makefile)"
#endif

SPANK_PLUGIN(tm_slurm, 1)

/* Read from the file by `tm-slurm doctor`. */
static const char build[] __attribute__((used)) = TM_BUILD;

struct settings settings = {.notify = TM_NOTIFY, .state = TM_STATE};
struct options options;

static void take_path(char *target, const char *given, const char *name)
{
    if (given[0] != '/' || strlen(given) >= PATH_MAX) {
        slurm_error("tm_slurm: plugstack.conf: %s: expected an absolute path, found '%s'", name, given);
        return;
    }
    snprintf(target, PATH_MAX, "%s", given);
}

static void read_arguments(int count, char **arguments)
{
    for (int i = 0; i < count; i++) {
        if (strncmp(arguments[i], "notify=", 7) == 0)
            take_path(settings.notify, arguments[i] + 7, "notify");
        else if (strncmp(arguments[i], "state=", 6) == 0)
            take_path(settings.state, arguments[i] + 6, "state");
        else
            slurm_error("tm_slurm: plugstack.conf: unknown argument '%s'", arguments[i]);
    }
}

/* Slurm refuses a plugin of another release by itself; this is for one that would not. */
static bool is_of_this_release(spank_t spank)
{
    char *major = NULL, *minor = NULL;
    if (spank_get_item(spank, S_SLURM_VERSION_MAJOR, &major) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_SLURM_VERSION_MINOR, &minor) != ESPANK_SUCCESS || !major || !minor)
        return true;
    long built_major = SLURM_VERSION_MAJOR(SLURM_VERSION_NUMBER);
    long built_minor = SLURM_VERSION_MINOR(SLURM_VERSION_NUMBER);
    if (strtol(major, NULL, 10) == built_major && strtol(minor, NULL, 10) == built_minor)
        return true;
    slurm_info("tm_slurm: built for Slurm %ld.%02ld, this is %s.%s: does nothing; build it again with "
               "`make spank`",
               built_major, built_minor, major, minor);
    return false;
}

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
    read_arguments(count, arguments);
    settings.inert = !is_of_this_release(spank);
    switch (spank_context()) {
    case S_CTX_LOCAL:
    case S_CTX_REMOTE:
    case S_CTX_ALLOCATOR:
        if (!settings.inert)
            options_register(spank);
        break;
    default:
        break;
    }
    return ESPANK_SUCCESS;
}

int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    if (settings.inert)
        return ESPANK_SUCCESS;
    switch (spank_context()) {
    case S_CTX_ALLOCATOR:
        return allocator_init_post_opt(spank);
    case S_CTX_LOCAL:
        return local_init_post_opt(spank);
    case S_CTX_REMOTE:
        return remote_init_post_opt(spank);
    default:
        return ESPANK_SUCCESS;
    }
}

int slurm_spank_user_init(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    return settings.inert ? ESPANK_SUCCESS : remote_user_init(spank);
}

int slurm_spank_task_exit(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    return settings.inert ? ESPANK_SUCCESS : remote_task_exit(spank);
}

int slurm_spank_exit(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    return settings.inert || spank_context() != S_CTX_REMOTE ? ESPANK_SUCCESS : remote_exit(spank);
}

int slurm_spank_slurmd_exit(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    return settings.inert ? ESPANK_SUCCESS : slurmd_exit_context(spank);
}

int slurm_spank_job_prolog(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    return settings.inert ? ESPANK_SUCCESS : job_script_prolog(spank);
}

int slurm_spank_job_epilog(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    return settings.inert ? ESPANK_SUCCESS : job_script_epilog(spank);
}
