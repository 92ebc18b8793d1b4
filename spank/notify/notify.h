/* tm-notify: tells a job's coordinator one fact, signed with the job's secret. Parts of one small program. */
#ifndef TM_SLURM_NOTIFY_H
#define TM_SLURM_NOTIFY_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    SECRET_MIN = 32,
    SECRET_MAX = 4096,
    LEADER_FILE_MAX = 4096,
    FRAME_MAX = 4096, /* the coordinator reads no longer one from a stranger */
    REASON_MAX = 200,
    NAME_MAX_BYTES = 255,
};

/* What the command line says. Names are checked, the reason is cut. */
struct request {
    const char *state;
    const char *node;
    const char *kind;
    const char *source;
    const char *fact;
    const char *job_dir;
    char reason[REASON_MAX + 1];
    double at;
    uint32_t job;
    uint32_t restart;
    uid_t uid;
    gid_t gid;
    bool has_job, has_uid, has_gid, has_at, all_jobs, detach;
    int limit_ms;
};

/* Where a leader listens. */
struct leader {
    char host[256];
    char port[8];
    uint64_t term;
};

/* Text that grows in a buffer of fixed size. `full` says that something did not fit. */
struct text {
    char *at;
    size_t left;
    bool full;
};

/* json.c */
struct text text_in(char *buffer, size_t size);
void text_add(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void text_add_json(struct text *text, const char *string);
bool json_find(const char *object, const char *key, char *value, size_t size, bool *is_string);

/* arguments.c: prints one line and returns false for what it does not understand */
bool arguments_read(int count, char **words, struct request *request);

/* deadline.c */
void deadline_set(int limit_ms);
int deadline_left_ms(void);
void pause_ms(int ms);

/* cluster.c */
void cluster_identity(char *name, size_t size);

/* job_places.c: where the job's directory is; `job_dir` has room for PATH_MAX */
bool registered_place(const struct request *request, uint32_t job, struct request *filled, char *job_dir);
bool user_place(const struct request *request, char *job_dir);
int for_each_registered(const struct request *request, int (*tell)(const struct request *));

/* rights.c: to the job's user, for good */
bool become_user(const struct request *request);

/* job_dir.c */
bool secret_read(int directory, uid_t owner, unsigned char *secret, size_t *length);
bool leader_read(int directory, struct leader *leader);
bool leader_parse(const char *text, struct leader *leader);

/* message.c: the frame's length, or 0 when it cannot be made */
size_t message_make(const struct request *request, const struct leader *leader, const unsigned char *secret,
                    size_t secret_length, unsigned char frame[FRAME_MAX + 4]);

/* deliver.c */
enum outcome { DELIVERED, REFUSED, UNREACHABLE };
enum outcome deliver(const struct leader *leader, const unsigned char *frame, size_t length);

#endif
