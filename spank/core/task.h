/* What one task is told: its role and rank in the role, its zone, where rank 0 is. A pure function of what Slurm says
 * of the task and of what the environment of its step holds. */
#ifndef SLURMDL_TASK_H
#define SLURMDL_TASK_H

#include "ranks.h"

/* Texts may be NULL: not in the environment. */
struct dl_task {
	uint32_t rank, size, step;
	const char *strategy, *servers; /* --dl-strategy and --dl-ps, valid */
	bool mapped;                    /* the step was started with --dl-map */
	const char *map_size, *ps_ranks, *zone_ranks, *master, *port, *nodes;
	const char *node, *address; /* SLURMD_NODENAME, SLURM_TOPOLOGY_ADDR */
	const char *distribution;   /* SLURM_DISTRIBUTION */
};

struct dl_told {
	bool mapped;      /* the map holds for this step */
	const char *role; /* NULL where it is not known */
	uint32_t role_rank;
	char zone[DL_NAME_MAX + 1];
	char master[DL_NAME_MAX + 1]; /* "" without a map, as is */
	uint32_t port;
	char doubt[320]; /* what is wrong with the map, for the user; "" where nothing is */
	bool local;      /* the doubt is about this task's place, else every task has the same */
};

void dl_tell(const struct dl_task *task, struct dl_told *told);

#endif
