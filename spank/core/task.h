/* Environment of one task: role, rank in the role, zone, address of rank 0. A pure function of Slurm's data on the task
 * and of the step's environment. */
#ifndef SLURMDL_TASK_H
#define SLURMDL_TASK_H

#include "ranks.h"

/* Strings are NULL if not in the environment. */
struct dl_task {
	uint32_t rank, size, step;
	const char *strategy, *servers, *groups; /* valid values of --dl-strategy, --dl-ps and --dl-groups */
	bool mapped;                             /* the step was started with --dl-rank-map */
	const char *map_size, *role_ranks, *zone_ranks, *master, *port, *nodes;
	const char *node, *address; /* SLURMD_NODENAME, SLURM_TOPOLOGY_ADDR */
	const char *distribution;   /* SLURM_DISTRIBUTION */
};

struct dl_task_env {
	bool mapped;                /* the map applies to this step */
	char role[DL_NAME_MAX + 1]; /* "" if unknown */
	uint32_t role_rank;
	char zone[DL_NAME_MAX + 1];
	char master[DL_NAME_MAX + 1]; /* "" without a map */
	uint32_t port;
	char warning[320];  /* message on an invalid map, or "" */
	bool node_specific; /* the warning concerns this task's node; otherwise all tasks have the same */
};

void dl_task_env_fill(const struct dl_task *task, struct dl_task_env *env);

#endif
