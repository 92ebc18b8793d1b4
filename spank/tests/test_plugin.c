/* The plugin with Slurm's side played: what it takes, what it starts, and that it never fails. */
#undef NDEBUG
#include "plugin.h"
#include "spank_side.h"

#include <assert.h>
#include <slurm/slurm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

int slurm_spank_init(spank_t, int, char **);
int slurm_spank_init_post_opt(spank_t, int, char **);
int slurm_spank_user_init(spank_t, int, char **);
int slurm_spank_task_exit(spank_t, int, char **);
int slurm_spank_exit(spank_t, int, char **);
int slurm_spank_job_epilog(spank_t, int, char **);

static char folder[] = "/tmp/test_plugin.XXXXXX";
static char notify[64], state[64], told[64], notify_word[96], state_word[96];

/* Stands in the place of tm-notify, and writes down the words it was called with. */
static void place_notify(void)
{
    assert(mkdtemp(folder));
    snprintf(notify, sizeof notify, "%s/notify", folder);
    snprintf(state, sizeof state, "%s/state", folder);
    snprintf(told, sizeof told, "%s/told", folder);
    FILE *script = fopen(notify, "w");
    assert(script);
    fprintf(script, "#!/bin/sh\necho \"$@\" >>%s.new; mv %s.new %s\n", told, told, told);
    assert(fclose(script) == 0 && chmod(notify, 0755) == 0);
    snprintf(notify_word, sizeof notify_word, "notify=%s", notify);
    snprintf(state_word, sizeof state_word, "state=%s", state);
}

static char *await_words(void)
{
    static char words[4096];
    for (int i = 0; i < 10000; i++, nanosleep(&(struct timespec){0, 1000000}, NULL)) {
        FILE *file = fopen(told, "r");
        if (!file)
            continue;
        size_t length = fread(words, 1, sizeof words - 1, file);
        words[length] = '\0';
        fclose(file);
        unlink(told);
        return words;
    }
    abort();
}

static void begin(spank_context_t context)
{
    memset(&side, 0, sizeof side);
    memset(&options, 0, sizeof options);
    side.context = context;
    side.major = SLURM_VERSION_MAJOR(SLURM_VERSION_NUMBER);
    side.minor = SLURM_VERSION_MINOR(SLURM_VERSION_NUMBER);
    assert(slurm_spank_init(NULL, 2, (char *[]){notify_word, state_word, NULL}) == ESPANK_SUCCESS);
}

static int give(const char *option, const char *value, int remote)
{
    for (int i = 0; i < side.registered; i++)
        if (strcmp(side.options[i]->name, option) == 0)
            return side.options[i]->cb(side.options[i]->val, value, remote);
    abort();
}

static void options_are_checked_where_they_are_typed(void)
{
    static const char *const bad[][2] = {
        {"tm-standbys", ""},       {"tm-standbys", "-1"},       {"tm-standbys", "1x"}, {"tm-standbys", "65536"},
        {"tm-standbys", NULL},     {"tm-policy", ""},           {"tm-policy", "wait,"}, {"tm-policy", ",wait"},
        {"tm-policy", "wait,wait"}, {"tm-policy", "wai"},        {"tm-lead", "0"},      {"tm-lead", "10081"},
        {"tm-lead", "1.5"},        {"tm-lead", "99999999999999999999999"},
    };
    begin(S_CTX_ALLOCATOR);
    assert(side.registered == 4);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        side.said[0] = '\0';
        assert(give(bad[i][0], bad[i][1], 0) != ESPANK_SUCCESS);
        assert(strstr(side.said, bad[i][0]) && strstr(side.said, "expected") && !strchr(side.said, '\n'));
        assert(give(bad[i][0], bad[i][1], 1) == ESPANK_SUCCESS); /* on the node nothing fails */
    }
    assert(!options.standbys[0] && !options.policy[0] && !options.lead[0]);
    assert(give("tm-standbys", "2", 0) == ESPANK_SUCCESS && give("tm-policy", "double-up,fail", 0) == ESPANK_SUCCESS);
    assert(give("tm-lead", "5", 0) == ESPANK_SUCCESS && give("tm-off", NULL, 0) == ESPANK_SUCCESS);
    assert(slurm_spank_init_post_opt(NULL, 0, NULL) == ESPANK_SUCCESS);
    assert(strcmp(getenv("TM_SLURM_STANDBYS"), "2") == 0 && side.variables == 4);
}

static void begin_step(const char *job_dir)
{
    begin(S_CTX_REMOTE);
    side.step = 3;
    side_variable("SLURMD_NODENAME", "n5");
    if (job_dir)
        side_variable("TM_SLURM_EVENTS_TO", job_dir);
    assert(slurm_spank_init_post_opt(NULL, 0, NULL) == ESPANK_SUCCESS);
    assert(slurm_spank_user_init(NULL, 0, NULL) == ESPANK_SUCCESS);
}

static void a_task_that_ends_is_told(void)
{
    begin_step("/jobs/of me/7");
    side.task = 11;
    side.status = 9;
    assert(slurm_spank_task_exit(NULL, 0, NULL) == ESPANK_SUCCESS);
    const char *words = await_words();
    assert(strstr(words, "--node n5 --kind task_exit --source spank --fact 3.11"));
    assert(strstr(words, "task 11 of step 3 was killed by signal 9"));
    assert(strstr(words, "--job 7 --restart 0 --uid 1000 --gid 100 --job-dir /jobs/of me/7"));
    assert(slurm_spank_exit(NULL, 0, NULL) == ESPANK_SUCCESS);
    assert(strstr(await_words(), "--kind step_end --source spank --fact 3 "));
}

static void what_a_step_has_noted_is_found_until_the_epilog(void)
{
    struct job job;
    assert(registration_read("n5", 7, &job) && job.uid == 1000 && strcmp(job.job_dir, "/jobs/of me/7") == 0);
    assert(!registration_read("n6", 7, &job) && !registration_read("n5", 8, &job));
    assert(!registration_read("../n5", 7, &job) && !registration_read("", 7, &job));
    begin(S_CTX_JOB_SCRIPT);
    setenv("SLURMD_NODENAME", "n5", 1), setenv("SLURM_JOB_ID", "7", 1), setenv("SLURM_JOB_UID", "1000", 1);
    assert(slurm_spank_job_epilog(NULL, 0, NULL) == ESPANK_SUCCESS);
    assert(strstr(await_words(), "--kind node_leave"));
    assert(!registration_read("n5", 7, &job));
}

static void nothing_is_told_of_a_job_that_is_none_of_ours(void)
{
    static char longest[PATH_MAX + 10];
    memset(longest, 'x', sizeof longest - 1);
    longest[0] = '/';
    static const char *const none[] = {NULL, "", "relative", longest};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        begin_step(none[i]);
        assert(slurm_spank_task_exit(NULL, 0, NULL) == ESPANK_SUCCESS && slurm_spank_exit(NULL, 0, NULL) == ESPANK_SUCCESS);
    }
    begin_step("/jobs/two\nlines");
    struct job job;
    assert(!registration_read("n5", 7, &job));
    begin_step("/jobs/7");
    side.broken = true; /* Slurm does not say which task it is */
    assert(slurm_spank_task_exit(NULL, 0, NULL) == ESPANK_SUCCESS);
    side.broken = false;
    assert(slurm_spank_exit(NULL, 0, NULL) == ESPANK_SUCCESS);
    const char *words = await_words();
    assert(strstr(words, "step_end") && !strstr(words, "task_exit") && strchr(words, '\n') == strrchr(words, '\n'));
}

static void in_another_release_it_does_nothing(void)
{
    begin(S_CTX_REMOTE);
    memset(&side, 0, sizeof side);
    side.context = S_CTX_REMOTE;
    side.major = 99;
    assert(slurm_spank_init(NULL, 0, NULL) == ESPANK_SUCCESS && side.registered == 0);
    assert(strstr(side.said, "make spank"));
    side_variable("SLURMD_NODENAME", "n5");
    side_variable("TM_SLURM_EVENTS_TO", "/jobs/7");
    assert(slurm_spank_init_post_opt(NULL, 0, NULL) == ESPANK_SUCCESS);
    assert(slurm_spank_task_exit(NULL, 0, NULL) == ESPANK_SUCCESS);
    struct job job;
    assert(!registration_read("n5", 7, &job));
}

int main(void)
{
    place_notify();
    options_are_checked_where_they_are_typed();
    in_another_release_it_does_nothing();
    a_task_that_ends_is_told();
    what_a_step_has_noted_is_found_until_the_epilog();
    nothing_is_told_of_a_job_that_is_none_of_ours();
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert(system(command) == 0);
    puts("test_plugin: ok");
    return 0;
}
