/* What Slurm calls this node, where the job's environment does not say it. */
#include "plugin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* slurmd -N NAME, for several slurmd on one host. */
static bool from_command_line(char *name, size_t size)
{
    char line[4096];
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, line, sizeof line - 1);
    if (file >= 0)
        close(file);
    if (length <= 0)
        return false;
    line[length] = '\0';
    for (const char *word = line; word < line + length; word += strlen(word) + 1) {
        if (strncmp(word, "-N", 2) != 0)
            continue;
        const char *value = word[2] ? word + 2 : word + 3;
        return value < line + length && (size_t)snprintf(name, size, "%s", value) < size;
    }
    return false;
}

void node_name(char *name, size_t size)
{
    const char *said = getenv("SLURMD_NODENAME");
    if (said && (size_t)snprintf(name, size, "%s", said) < size)
        return;
    if (from_command_line(name, size))
        return;
    if (gethostname(name, size) != 0)
        name[0] = '\0';
    name[size - 1] = '\0';
    name[strcspn(name, ".")] = '\0';
}
