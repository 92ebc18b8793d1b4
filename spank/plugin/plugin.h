/* What the parts of the plugin share. Nothing here ever fails a job: every entry point returns success, but for
 * an option that is refused where it is typed. */
#ifndef TM_SLURM_PLUGIN_H
#define TM_SLURM_PLUGIN_H

#include <limits.h>
#include <slurm/spank.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { LIMIT_MS = 250, NODE_NAME_MAX = 256 };

/* From plugstack.conf, or as built. */
struct settings {
    char notify[PATH_MAX];
    char state[PATH_MAX];
    bool inert; /* built for another release: do nothing at all */
};

/* What the user has said: empty where nothing. */
struct options {
    char standbys[16];
    char policy[128];
    char lead[16];
    bool off;
};

/* A job as an administrator's machine knows it. `job_dir` is empty where nobody has said it. */
struct job {
    uint32_t id;
    uint32_t restart;
    uid_t uid;
    gid_t gid;
    char job_dir[PATH_MAX];
};

/* What is to be told. `fact` tells this fact from others of its kind about the same node. */
struct event {
    const char *kind;
    const char *fact;
    const char *reason;
};

extern struct settings settings;
extern struct options options;

/* The variable in which a job says where its directory is; the plugin passes it on to prolog and epilog. */
#define VARIABLE_JOB_DIR "TM_SLURM_EVENTS_TO"
#define VARIABLE_OFF "TM_SLURM_OFF"

/* options.c */
void options_register(spank_t spank);
void options_to(spank_t spank, int (*set)(spank_t, const char *, const char *));
bool options_check_count(const char *text, long least, long most);
bool options_check_policy(const char *text);

/* registration.c: which jobs have a coordinator, on this node, written by root alone */
bool registration_write(const char *node, const struct job *job);
bool registration_read(const char *node, uint32_t job_id, struct job *job);
void registration_end(const char *node, uint32_t job_id);
bool is_plain_name(const char *text);

/* tell.c: starts tm-notify and does not wait for what comes of it */
void tell(const char *node, const struct job *job, const struct event *event);
void tell_all_jobs(const char *node, const struct event *event);

/* node_name.c */
void node_name(char *name, size_t size);

/* One file a context. */
int allocator_init_post_opt(spank_t spank); /* sbatch, salloc */
int local_init_post_opt(spank_t spank);     /* srun */
int remote_init_post_opt(spank_t spank);    /* slurmstepd */
int remote_user_init(spank_t spank);
int remote_task_exit(spank_t spank);
int remote_exit(spank_t spank);
int slurmd_exit_context(spank_t spank);
int job_script_prolog(spank_t spank);
int job_script_epilog(spank_t spank);

#endif
