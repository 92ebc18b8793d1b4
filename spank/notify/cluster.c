/* Which cluster this is, named as tm_slurm/slurm/configuration.py names it: every cluster counts its jobs from 1. */
#include "notify.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char *const places[] = {
    "/etc/slurm/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/usr/local/etc/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
};

enum { VALUE_MAX = 128 };

/* "KEY = VALUE" in a line, if nothing has been said of it before. */
static void take(const char *line, const char *key, char value[VALUE_MAX])
{
    size_t length = strlen(key);
    line += strspn(line, " \t");
    if (value[0] || strncasecmp(line, key, length) != 0)
        return;
    line += length + strspn(line + length, " \t");
    if (*line != '=')
        return;
    line += 1 + strspn(line + 1, " \t");
    length = strcspn(line, " \t\r\n#");
    if (length < VALUE_MAX)
        snprintf(value, VALUE_MAX, "%.*s", (int)length, line);
}

static FILE *open_configuration(void)
{
    const char *named = getenv("SLURM_CONF");
    FILE *file = NULL;
    if (named && named[0])
        return fopen(named, "re");
    for (size_t i = 0; !file && i < sizeof places / sizeof *places; i++)
        file = fopen(places[i], "re");
    return file;
}

void cluster_identity(char *name, size_t size)
{
    char line[4096], cluster[VALUE_MAX] = "", host[VALUE_MAX] = "", older[VALUE_MAX] = "", port[VALUE_MAX] = "";
    FILE *file = open_configuration();
    while (file && fgets(line, sizeof line, file)) {
        take(line, "ClusterName", cluster);
        take(line, "SlurmctldHost", host);
        take(line, "ControlMachine", older);
        take(line, "SlurmctldPort", port);
    }
    if (file)
        fclose(file);
    if (!cluster[0] ||
        (size_t)snprintf(name, size, "%s@%s@%s", cluster, host[0] ? host : older, port[0] ? port : "6817") >= size) {
        snprintf(name, size, "unknown");
        return;
    }
    for (char *byte = name; *byte; byte++)
        if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.@-", *byte))
            *byte = '_';
}
