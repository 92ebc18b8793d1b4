/* Slurm's side of the interface for test_plugin: one step of one job, as slurmstepd would show it. */
#include "spank_side.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct side side;

static const char *environment(const char *name)
{
    for (int i = 0; i < side.variables; i++)
        if (strcmp(side.names[i], name) == 0)
            return side.values[i];
    return NULL;
}

spank_context_t spank_context(void)
{
    return side.context;
}

const char *spank_strerror(spank_err_t error)
{
    return error == ESPANK_SUCCESS ? "success" : "error";
}

spank_err_t spank_option_register(spank_t spank, struct spank_option *option)
{
    (void)spank;
    side.options[side.registered++] = option;
    return ESPANK_SUCCESS;
}

spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...)
{
    static char major[8], minor[8];
    va_list arguments;
    (void)spank;
    va_start(arguments, item);
    void *target = va_arg(arguments, void *);
    va_end(arguments);
    snprintf(major, sizeof major, "%d", side.major);
    snprintf(minor, sizeof minor, "%02d", side.minor);
    switch (item) {
    case S_SLURM_VERSION_MAJOR:
        *(char **)target = major;
        return ESPANK_SUCCESS;
    case S_SLURM_VERSION_MINOR:
        *(char **)target = minor;
        return ESPANK_SUCCESS;
    case S_JOB_ID:
        *(uint32_t *)target = 7;
        break;
    case S_JOB_UID:
        *(uid_t *)target = 1000;
        break;
    case S_JOB_GID:
        *(gid_t *)target = 100;
        break;
    case S_JOB_STEPID:
        *(uint32_t *)target = side.step;
        break;
    case S_TASK_GLOBAL_ID:
        *(uint32_t *)target = side.task;
        break;
    case S_TASK_EXIT_STATUS:
        *(int *)target = side.status;
        break;
    default:
        return ESPANK_NOT_AVAIL;
    }
    return side.broken ? ESPANK_ERROR : ESPANK_SUCCESS;
}

spank_err_t spank_getenv(spank_t spank, const char *name, char *buffer, int size)
{
    const char *value = environment(name);
    (void)spank;
    if (!value)
        return ESPANK_ENV_NOEXIST;
    return snprintf(buffer, (size_t)size, "%s", value) < size ? ESPANK_SUCCESS : ESPANK_NOSPACE;
}

spank_err_t spank_setenv(spank_t spank, const char *name, const char *value, int overwrite)
{
    (void)spank, (void)overwrite;
    side_variable(name, value);
    return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_setenv(spank_t spank, const char *name, const char *value, int overwrite)
{
    return spank_setenv(spank, name, value, overwrite);
}

void side_variable(const char *name, const char *value)
{
    side.names[side.variables] = name;
    snprintf(side.values[side.variables++], sizeof *side.values, "%s", value);
}

static void say(const char *format, va_list arguments)
{
    vsnprintf(side.said, sizeof side.said, format, arguments);
}

#define LOG(name)                                                                                                      \
    void name(const char *format, ...)                                                                                 \
    {                                                                                                                  \
        va_list arguments;                                                                                             \
        va_start(arguments, format);                                                                                   \
        say(format, arguments);                                                                                        \
        va_end(arguments);                                                                                             \
    }

LOG(slurm_info)
LOG(slurm_error)
LOG(slurm_debug)
LOG(slurm_spank_log)
