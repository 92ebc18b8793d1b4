/* Which jobs of this node have a coordinator: one file a job in STATE/NODE, written and read by root alone.
 *
 *     UID GID RESTART
 *     JOB DIRECTORY
 *
 * After the epilog the file is called JOB.ended, for an epilog program that comes later; an hour later it goes. */
#include "plugin.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { ENDED_KEPT_S = 3600 };

/* A name that is one step of a path. */
bool is_plain_name(const char *text)
{
    size_t length = strlen(text);
    return length > 0 && length < NODE_NAME_MAX && text[0] != '.' && text[0] != '-' &&
           strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == length;
}

/* The folder of a node, open; -1 when there is none, or it is not ours alone. */
static int open_folder(const char *node, bool make)
{
    char path[PATH_MAX];
    struct stat found;
    int folder = -1;
    if (!is_plain_name(node) || (size_t)snprintf(path, sizeof path, "%s/%s", settings.state, node) >= sizeof path)
        return -1;
    if (make && mkdir(settings.state, 0755) != 0 && errno != EEXIST)
        return -1;
    if (make && mkdir(path, 0700) != 0 && errno != EEXIST)
        return -1;
    folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder >= 0 && (fstat(folder, &found) != 0 || found.st_uid != geteuid() || (found.st_mode & 022))) {
        close(folder);
        folder = -1;
    }
    return folder;
}

static void sweep(int folder)
{
    int again = dup(folder);
    DIR *entries = again < 0 ? NULL : fdopendir(again);
    struct dirent *entry;
    struct stat found;
    if (!entries) {
        if (again >= 0)
            close(again);
        return;
    }
    while ((entry = readdir(entries))) {
        const char *end = strrchr(entry->d_name, '.');
        if (end && strcmp(end, ".ended") == 0 && fstatat(folder, entry->d_name, &found, AT_SYMLINK_NOFOLLOW) == 0 &&
            time(NULL) - found.st_mtime > ENDED_KEPT_S)
            unlinkat(folder, entry->d_name, 0);
    }
    closedir(entries);
}

bool registration_write(const char *node, const struct job *job)
{
    char text[PATH_MAX + 64], name[32], fresh[64];
    bool written = false;
    int length = snprintf(text, sizeof text, "%u %u %u\n%s\n", (unsigned)job->uid, (unsigned)job->gid,
                          (unsigned)job->restart, job->job_dir);
    int folder = strchr(job->job_dir, '\n') ? -1 : open_folder(node, true);
    if (folder < 0)
        return false;
    sweep(folder);
    snprintf(name, sizeof name, "%u", job->id);
    snprintf(fresh, sizeof fresh, ".%u.%ld", job->id, (long)getpid());
    unlinkat(folder, fresh, 0);
    int file = openat(folder, fresh, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file >= 0) {
        written = write(file, text, (size_t)length) == length;
        written = close(file) == 0 && written && renameat(folder, fresh, folder, name) == 0;
        if (!written)
            unlinkat(folder, fresh, 0);
    }
    close(folder);
    return written;
}

bool registration_read(const char *node, uint32_t job_id, struct job *job)
{
    char text[PATH_MAX + 64], name[32];
    unsigned uid, gid, restart;
    int rest = 0;
    snprintf(name, sizeof name, "%u", job_id);
    int folder = open_folder(node, false);
    int file = folder < 0 ? -1 : openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    if (folder >= 0)
        close(folder);
    if (length <= 0)
        return false;
    text[length] = '\0';
    if (sscanf(text, "%u %u %u\n%n", &uid, &gid, &restart, &rest) != 3 || text[rest] != '/')
        return false;
    text[rest + (int)strcspn(text + rest, "\n")] = '\0';
    if (strlen(text + rest) >= sizeof job->job_dir)
        return false;
    *job = (struct job){.id = job_id, .restart = restart, .uid = uid, .gid = gid};
    memcpy(job->job_dir, text + rest, strlen(text + rest) + 1);
    return true;
}

void registration_end(const char *node, uint32_t job_id)
{
    char name[32], ended[48];
    int folder = open_folder(node, false);
    if (folder < 0)
        return;
    snprintf(name, sizeof name, "%u", job_id);
    snprintf(ended, sizeof ended, "%u.ended", job_id);
    renameat(folder, name, folder, ended);
    utimensat(folder, ended, NULL, 0);
    close(folder);
}
