/* The parts of tm-notify, without a network: what users can put into their files must harm nobody. */
#include "notify.h"

#undef NDEBUG
#include <assert.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool parses(const char *text, struct leader *leader)
{
    /* On the heap, without a byte to spare, so that a read beyond the end is seen. */
    char *copy = strdup(text);
    bool parsed = leader_parse(copy, leader);
    free(copy);
    return parsed;
}

static void a_leader_file_is_read(void)
{
    struct leader leader;
    assert(parses("{\"node\": \"n1\", \"host\": \"10.0.0.1\", \"port\": 4711, \"term\": 3, \"attempt\": 0, \"renewal\": 9, "
                  "\"at\": 1.5, \"resigned\": false}",
                  &leader));
    assert(strcmp(leader.host, "10.0.0.1") == 0 && strcmp(leader.port, "4711") == 0 && leader.term == 3);
    assert(parses("{\"later\":\"\\u00e9 \\\" }\",\"term\":1,\"port\":1,\"host\":\"a\"}", &leader));
}

static void a_leader_file_with_anything_else_is_none(void)
{
    static const char *const bad[] = {
        "", " ", "{", "{}", "[]", "null", "{\"host\"", "{\"host\":", "{\"host\":\"", "{\"host\":\"a\\", "{\"host\":\"a\"",
        "{\"host\":\"a\",\"port\":0,\"term\":1}",
        "{\"host\":\"a\",\"port\":65536,\"term\":1}",
        "{\"host\":\"a\",\"port\":-1,\"term\":1}",
        "{\"host\":\"a\",\"port\":\"1\",\"term\":1}",
        "{\"host\":\"a\",\"port\":1,\"term\":-1}",
        "{\"host\":\"a\",\"port\":1,\"term\":1e3}",
        "{\"host\":\"a\",\"port\":1,\"term\":99999999999999999999999999999999999999}",
        "{\"host\":\"\",\"port\":1,\"term\":1}",
        "{\"host\":5,\"port\":1,\"term\":1}",
        "{\"host\":{\"a\":1},\"port\":1,\"term\":1}",
        "{\"host\":\"a\",\"port\":1,\"term\":1,\"resigned\":true}",
        "{\"resigned\":\"false\",\"host\":\"a\",\"port\":1,\"term\":1}",
        "{\"host\":\"a\nb\",\"port\":1,\"term\":1}",
        "{\"host\":\"a\" \"port\":1,\"term\":1}",
    };
    struct leader leader;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (parses(bad[i], &leader)) {
            fprintf(stderr, "taken for a leader file: %s\n", bad[i]);
            abort();
        }
    char *longest = malloc(100000);
    memset(longest, 'x', 99999);
    longest[99999] = '\0';
    memcpy(longest, "{\"host\":\"", 9);
    assert(!parses(longest, &leader));
    free(longest);
}

/* Every prefix of a file, and every byte of it replaced: read to an end, whatever comes of it. */
static void a_leader_file_that_was_torn_harms_nobody(void)
{
    static const char whole[] = "{\"host\": \"10.0.0.1\", \"port\": 4711, \"term\": 3, \"resigned\": false}";
    struct leader leader;
    char text[sizeof whole];
    for (size_t i = 0; i < sizeof whole - 1; i++) {
        memcpy(text, whole, sizeof whole);
        text[i] = '\0';
        parses(text, &leader);
        for (const char *byte = "\"\\{},:\x01\xff 9a"; *byte; byte++) {
            memcpy(text, whole, sizeof whole);
            text[i] = *byte;
            parses(text, &leader);
        }
    }
}

static struct request request_with(const char *reason)
{
    struct request request = {.node = "n1", .kind = "down", .source = "spank", .fact = "0.1", .job = 7, .at = 1e9};
    snprintf(request.reason, sizeof request.reason, "%s", reason);
    return request;
}

static void any_reason_fits_into_a_frame(void)
{
    unsigned char frame[FRAME_MAX + 4], secret[SECRET_MIN] = {1};
    struct leader leader = {.term = UINT64_MAX};
    for (int byte = 1; byte < 256; byte++) {
        char reason[REASON_MAX + 1];
        memset(reason, byte, REASON_MAX);
        reason[REASON_MAX] = '\0';
        struct request request = request_with(reason);
        size_t length = message_make(&request, &leader, secret, sizeof secret, frame);
        size_t said = (size_t)frame[2] << 8 | frame[3];
        assert(length > 100 && length == said + 4 && frame[0] == 0 && frame[1] == 0);
        assert(frame[4] == '{' && frame[length - 1] == '}');
    }
}

static void no_two_frames_are_equal(void)
{
    unsigned char one[FRAME_MAX + 4], two[FRAME_MAX + 4], secret[SECRET_MIN] = {1};
    struct leader leader = {.term = 1};
    struct request request = request_with("why");
    size_t length = message_make(&request, &leader, secret, sizeof secret, one);
    assert(length == message_make(&request, &leader, secret, sizeof secret, two));
    assert(memcmp(one, two, length) != 0);
}

static bool takes(struct request *request, char **words)
{
    int count = 0;
    while (words[count])
        count++;
    optind = 1;
    return arguments_read(count, words, request);
}

#define WORDS(...) ((char *[]){"tm-notify", __VA_ARGS__, NULL})
#define USUAL "--node", "n1", "--kind", "down", "--source", "spank"

static void only_what_is_meant_is_taken_from_the_command_line(void)
{
    struct request request;
    assert(takes(&request, WORDS(USUAL, "--job", "7", "--uid", "1000", "--at", "1.5", "--job-dir", "/a")));
    assert(request.job == 7 && request.uid == 1000 && request.at == 1.5 && strcmp(request.job_dir, "/a") == 0);
    assert(takes(&request, WORDS(USUAL, "--all-jobs")));
    assert(freopen("/dev/null", "w", stderr));
    assert(!takes(&request, WORDS(USUAL)));
    assert(!takes(&request, WORDS(USUAL, "--all-jobs", "--job", "7", "--uid", "1")));
    assert(!takes(&request, WORDS(USUAL, "--job", "7")));
    assert(!takes(&request, WORDS(USUAL, "--job", "-7", "--uid", "1")));
    assert(!takes(&request, WORDS(USUAL, "--job", "99999999999", "--uid", "1")));
    assert(!takes(&request, WORDS(USUAL, "--job", "7", "--uid", "4294967295")));
    assert(!takes(&request, WORDS(USUAL, "--job", "7", "--uid", "1", "--at", "nan")));
    assert(!takes(&request, WORDS(USUAL, "--job", "7", "--uid", "1", "--job-dir", "relative")));
    assert(!takes(&request, WORDS(USUAL, "--job", "7", "--uid", "1", "--node", "../n1")));
    assert(!takes(&request, WORDS(USUAL, "--job", "7", "--uid", "1", "stray")));
    assert(!takes(&request, WORDS(USUAL, "--job", "7", "--uid", "1", "--what")));
}

static void put(const char *name, const char *content, mode_t mode)
{
    int file = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert(file >= 0 && write(file, content, strlen(content)) == (ssize_t)strlen(content));
    assert(fchmod(file, mode) == 0 && close(file) == 0);
}

static void a_secret_that_others_could_have_written_or_read_is_none(void)
{
    static const char good[] = "0123456789abcdef0123456789abcdef";
    unsigned char secret[SECRET_MAX];
    size_t length;
    char folder[] = "/tmp/test_notify.XXXXXX";
    assert(mkdtemp(folder) && chdir(folder) == 0);
    int directory = open(".", O_RDONLY | O_DIRECTORY);
    assert(!secret_read(directory, getuid(), secret, &length));
    put("secret", good, 0600);
    assert(secret_read(directory, getuid(), secret, &length) && length == 32 && memcmp(secret, good, 32) == 0);
    assert(!secret_read(directory, getuid() + 1, secret, &length));
    put("secret", good, 0640);
    assert(!secret_read(directory, getuid(), secret, &length));
    put("secret", "short", 0600);
    assert(!secret_read(directory, getuid(), secret, &length));
    assert(unlink("secret") == 0);
    put("elsewhere", good, 0600);
    assert(symlink("elsewhere", "secret") == 0 && !secret_read(directory, getuid(), secret, &length));
    assert(unlink("secret") == 0 && mkfifo("secret", 0600) == 0);
    assert(!secret_read(directory, getuid(), secret, &length)); /* and does not wait for a writer */
    assert(unlink("secret") == 0 && unlink("elsewhere") == 0 && close(directory) == 0);
    assert(chdir("/") == 0 && rmdir(folder) == 0);
}

static void a_cluster_is_named_as_the_job_named_it(void)
{
    char name[64], file[] = "/tmp/test_notify.XXXXXX";
    int opened = mkstemp(file);
    static const char text[] = "# ClusterName=no\n clustername = Big one\nSlurmctldHost=ctl(10.0.0.1) # c\nSlurmctldPort=1\n";
    assert(opened >= 0 && write(opened, text, sizeof text - 1) == sizeof text - 1 && close(opened) == 0);
    setenv("SLURM_CONF", file, 1);
    cluster_identity(name, sizeof name);
    assert(strcmp(name, "Big@ctl_10.0.0.1_@1") == 0 && unlink(file) == 0);
    cluster_identity(name, sizeof name);
    assert(strcmp(name, "unknown") == 0);
}

int main(void)
{
    a_cluster_is_named_as_the_job_named_it();
    a_leader_file_is_read();
    a_leader_file_with_anything_else_is_none();
    a_leader_file_that_was_torn_harms_nobody();
    any_reason_fits_into_a_frame();
    no_two_frames_are_equal();
    a_secret_that_others_could_have_written_or_read_is_none();
    only_what_is_meant_is_taken_from_the_command_line();
    puts("test_notify: ok");
    return 0;
}
