/* What the job's directory says: the secret, and where the leader listens. */
#include "notify.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The whole file, if it is a plain one of at most `size` bytes. -1 otherwise. */
static ssize_t read_whole(int directory, const char *name, void *content, size_t size, struct stat *about)
{
    size_t length = 0;
    int file = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0)
        return -1;
    bool plain = fstat(file, about) == 0 && S_ISREG(about->st_mode);
    while (plain && length < size) {
        ssize_t count = read(file, (char *)content + length, size - length);
        if (count < 0)
            plain = false;
        if (count <= 0)
            break;
        length += (size_t)count;
    }
    close(file);
    return plain && length < size ? (ssize_t)length : -1;
}

bool secret_read(int directory, uid_t owner, unsigned char *secret, size_t *length)
{
    struct stat about;
    ssize_t count = read_whole(directory, "secret", secret, SECRET_MAX, &about);
    if (count < SECRET_MIN || about.st_uid != owner || (about.st_mode & 077))
        return false;
    *length = (size_t)count;
    return true;
}

bool leader_parse(const char *text, struct leader *leader)
{
    char value[32];
    bool is_string;
    if (json_find(text, "resigned", value, sizeof value, &is_string) && (is_string || strcmp(value, "false") != 0))
        return false;
    if (!json_find(text, "host", leader->host, sizeof leader->host, &is_string) || !is_string || !leader->host[0])
        return false;
    if (!json_find(text, "port", value, sizeof value, &is_string) || is_string || strlen(value) > 5 ||
        strspn(value, "0123456789") != strlen(value) || atol(value) < 1 || atol(value) > 65535)
        return false;
    snprintf(leader->port, sizeof leader->port, "%.5s", value);
    if (!json_find(text, "term", value, sizeof value, &is_string) || is_string || strlen(value) > 18 ||
        strspn(value, "0123456789") != strlen(value))
        return false;
    leader->term = strtoull(value, NULL, 10);
    return true;
}

bool leader_read(int directory, struct leader *leader)
{
    char text[LEADER_FILE_MAX + 1];
    struct stat about;
    ssize_t length = read_whole(directory, "leader.json", text, LEADER_FILE_MAX, &about);
    if (length <= 0 || memchr(text, '\0', (size_t)length))
        return false;
    text[length] = '\0';
    return leader_parse(text, leader);
}
