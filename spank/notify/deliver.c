/* One connection, one frame, one answer; every wait ends at the deadline. */
#include "notify.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static bool wait_for(int connection, short what)
{
    struct pollfd one = {.fd = connection, .events = what};
    int left;
    while ((left = deadline_left_ms()) > 0) {
        int ready = poll(&one, 1, left);
        if (ready > 0)
            return true;
        if (ready < 0 && errno != EINTR)
            return false;
    }
    return false;
}

static int connect_to(const struct leader *leader)
{
    struct addrinfo wanted = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *found = NULL;
    int connection = -1, error = 0, on = 1;
    socklen_t size = sizeof error;
    if (getaddrinfo(leader->host, leader->port, &wanted, &found) != 0)
        return -1;
    connection = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connection >= 0) {
        setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        if ((connect(connection, found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS) ||
            !wait_for(connection, POLLOUT) ||
            getsockopt(connection, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
            close(connection);
            connection = -1;
        }
    }
    freeaddrinfo(found);
    return connection;
}

static bool send_all(int connection, const unsigned char *bytes, size_t length)
{
    while (length > 0) {
        ssize_t count = send(connection, bytes, length, MSG_NOSIGNAL);
        if (count > 0) {
            bytes += count;
            length -= (size_t)count;
        } else if (errno == EINTR) {
            continue;
        } else if ((errno != EAGAIN && errno != EWOULDBLOCK) || !wait_for(connection, POLLOUT)) {
            return false;
        }
    }
    return true;
}

static bool receive_all(int connection, void *content, size_t length)
{
    char *at = content;
    while (length > 0) {
        ssize_t count = recv(connection, at, length, 0);
        if (count > 0) {
            at += count;
            length -= (size_t)count;
        } else if (count == 0) {
            return false;
        } else if (errno != EINTR && ((errno != EAGAIN && errno != EWOULDBLOCK) || !wait_for(connection, POLLIN))) {
            return false;
        }
    }
    return true;
}

static enum outcome read_answer(int connection)
{
    unsigned char prefix[4];
    char answer[1024], value[256];
    bool is_string;
    if (!receive_all(connection, prefix, sizeof prefix))
        return UNREACHABLE;
    uint32_t length = (uint32_t)prefix[0] << 24 | (uint32_t)prefix[1] << 16 | (uint32_t)prefix[2] << 8 | prefix[3];
    if (length >= sizeof answer || !receive_all(connection, answer, length))
        return UNREACHABLE;
    answer[length] = '\0';
    if (json_find(answer, "ok", value, sizeof value, &is_string) && !is_string && strcmp(value, "true") == 0)
        return DELIVERED;
    if (json_find(answer, "refused", value, sizeof value, &is_string))
        fprintf(stderr, "tm-notify: the coordinator refused: %s\n", value);
    return REFUSED;
}

enum outcome deliver(const struct leader *leader, const unsigned char *frame, size_t length)
{
    enum outcome outcome = UNREACHABLE;
    int connection = connect_to(leader);
    if (connection < 0)
        return UNREACHABLE;
    if (send_all(connection, frame, length))
        outcome = read_answer(connection);
    close(connection);
    return outcome;
}
