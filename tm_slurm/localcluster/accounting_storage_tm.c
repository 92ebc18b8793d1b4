/*
 * Accounting for a cluster without a database that lets a job be resized more than once.
 *
 * Up to 24.05, slurmctld marks a running job "waiting for its database index" whenever it is resized (a node given
 * back, or lost), and refuses every further update of it until the accounting plugin sets that index. Slurm's own
 * accounting_storage/none never does. This plugin does; all else is that plugin's, found through the dynamic linker.
 */
#include <stddef.h>
#include <stdint.h>

extern const char plugin_name[];
extern const char plugin_type[];
extern const uint32_t plugin_version;
int jobacct_storage_p_job_start(void *connection, void *job);

const char plugin_name[] = "Accounting without a database, for jobs that are resized";
const char plugin_type[] = "accounting_storage/tm";
const uint32_t plugin_version = SLURM_VERSION;

/* NO_VAL64 of slurm.h: in a job's record only the index that is waited for has this value. */
static const uint64_t waiting = 0xfffffffffffffffeULL;
/* The record is some 2 KB; the index stands at byte 184 in 22.05. */
static const size_t words = 64;

int jobacct_storage_p_job_start(void *connection, void *job)
{
	static uint64_t last_index; /* slurmctld calls with the jobs locked for writing */
	uint64_t *record = job;

	(void)connection;
	for (size_t i = 0; i < words; i++) {
		if (record[i] == waiting) {
			record[i] = ++last_index;
			break;
		}
	}
	return 0;
}
