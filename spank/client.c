/* sbatch, salloc and srun: options are checked and go to the job as SLURMDL_OPT_*; --dl-map gives its step the job's
 * map. Reads the command line and the environment only, starts nothing. */
#define _GNU_SOURCE
#include "core/task.h"
#include "glue.h"

#include <slurm/slurm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* the map as a file in memory, while srun reads its options */
static int hostfile = -1;

/* In Slurm's order the script is weaker than the environment, that than the command line. Slurm reads the twins of
 * plugins' options between the two under names of its own, so ours are shown to it under those. */
void dl_client_init(int srun)
{
	for (int i = 0; i < DL_OPTIONS; i++) {
		const char *value = getenv(dl_options[i].variable);
		if (value && dl_options[i].kind == DL_FLAG && !dl_is_set(value))
			unsetenv(dl_options[i].slurms);
		else if (value)
			setenv(dl_options[i].slurms, value, 1);
	}
	if (srun) { /* a map is asked for on a command line, and is never inherited */
		unsetenv("SLURM_SPANK__SLURM_SPANK_OPTION_slurmdl_dl_map");
		unsetenv("_SLURM_SPANK_OPTION_slurmdl_dl_map");
	}
}

/* Parameter servers and another strategy exclude each other: what is said later counts, and of two variables in the
 * environment the strategy. What is set aside stays so in the job, to which Slurm hands on all that was given. */
static void settle(int index, const char *value)
{
	const char *strategy = getenv(dl_options[DL_OPT_STRATEGY].variable);
	const char *servers = getenv(dl_options[DL_OPT_PS].variable);
	const char *shown = getenv(dl_options[DL_OPT_PS].slurms);
	char message[DL_MESSAGE];
	unsigned count = 0;
	if (!strategy || !strcmp(strategy, "ps") || !servers || !dl_number(servers, &count) || !count)
		return;
	if (!dl_option_check(&dl_options[DL_OPT_STRATEGY], strategy, "", message))
		return; /* the environment's own; it is refused when its turn comes */
	if (index == DL_OPT_PS && !(shown && !strcmp(shown, value))) {
		slurm_spank_log("slurmdl: --dl-ps=%u: the strategy is ps, not %s", count, strategy);
		setenv(dl_options[DL_OPT_STRATEGY].variable, "ps", 1);
	} else {
		slurm_spank_log("slurmdl: --dl-strategy=%s has no parameter servers: --dl-ps=%u is set aside", strategy, count);
		setenv(dl_options[DL_OPT_PS].variable, "0", 1);
	}
}

/* NULL, or why the job's map cannot be applied. */
static const char *map_of_job(const char *nodes, uint32_t *size)
{
	const char *stamp = getenv("SLURMDL_MAP_JOB"), *job = getenv("SLURM_JOB_ID");
	if (!nodes)
		return "the job has no map (SLURMDL_MAP_NODES)";
	if (!job || !stamp || strcmp(job, stamp))
		return "SLURMDL_MAP_NODES is the map of another job";
	if (dl_count_nodes(nodes, size))
		return "SLURMDL_MAP_NODES is malformed: NODE,NODE(xTASKS),... was expected";
	hostlist_t given = slurm_hostlist_create(getenv("SLURM_JOB_NODELIST"));
	const char *why = given ? NULL : "SLURM_JOB_NODELIST is not set";
	while (*nodes && !why) {
		struct dl_span node;
		uint32_t repeats;
		char name[DL_NAME_MAX + 1];
		dl_next_nodes(&nodes, &node, &repeats);
		memcpy(name, node.at, node.length);
		name[node.length] = '\0';
		if (slurm_hostlist_find(given, name) < 0)
			why = "SLURMDL_MAP_NODES names a node that is not of the job";
	}
	slurm_hostlist_destroy(given);
	return why;
}

static void hand_on(const char *to, const char *from)
{
	const char *value = getenv(from);
	if (value)
		setenv(to, value, 1);
	else
		unsetenv(to);
}

/* srun takes a host file from SLURM_HOSTFILE, which it reads after its options, where neither -w nor -F is given; line i
 * is the node of rank i (srun(1)). */
static int apply_map(void)
{
	const char *nodes = getenv("SLURMDL_MAP_NODES"), *job = getenv("SLURM_JOB_ID"), *array = getenv("SLURM_ARRAY_TASK_ID");
	uint32_t size = 0;
	struct dl_span node;
	unsigned job_number = 0, array_number = 0;
	char text[DL_NAME_MAX + 32];
	const char *why = map_of_job(nodes, &size);

	unsetenv("SLURMDL_SIZE");
	dl_client_post_opt();
	hostfile = why ? -1 : memfd_create("slurmdl-hostfile", MFD_CLOEXEC);
	FILE *file = hostfile < 0 ? NULL : fdopen(dup(hostfile), "w");
	if (!why && !file)
		why = "no memory for a host file";
	if (why) {
		const char *strict = getenv(dl_options[DL_OPT_STRICT].variable);
		bool fails = strict && dl_is_set(strict);
		slurm_spank_log("slurmdl: --dl-map: %s%s", why, fails ? "" : "; the step runs in srun's own order");
		dl_client_post_opt();
		return fails ? -1 : 0;
	}
	for (uint32_t repeats; *nodes;) {
		dl_next_nodes(&nodes, &node, &repeats);
		while (repeats--)
			fprintf(file, "%.*s\n", (int)node.length, node.at);
	}
	fclose(file);
	snprintf(text, sizeof(text), "/proc/self/fd/%d", hostfile);
	setenv("SLURM_HOSTFILE", text, 1);
	snprintf(text, sizeof(text), "%u", size);
	setenv("SLURMDL_SIZE", text, 1);
	dl_node_of(getenv("SLURMDL_MAP_NODES"), 0, &node);
	snprintf(text, sizeof(text), "%.*s", (int)node.length, node.at);
	setenv("SLURMDL_MASTER", text, 1);
	if (array)
		dl_number(array, &array_number);
	dl_number(job, &job_number);
	snprintf(text, sizeof(text), "%u", dl_port(job_number, array_number));
	setenv("SLURMDL_PORT", text, 1);
	hand_on("SLURMDL_PS_RANKS", "SLURMDL_MAP_PS_RANKS");
	hand_on("SLURMDL_ZONE_RANKS", "SLURMDL_MAP_ZONE_RANKS");
	hand_on("SLURMDL_PLAN", "SLURMDL_MAP_PLAN");
	return 0;
}

int dl_client_option(int index, const char *value)
{
	char message[DL_MESSAGE], source[96];
	if (index == DL_OPT_MAP)
		return apply_map();
	const struct dl_option *option = &dl_options[index];
	value = option->kind == DL_FLAG || !value ? "" : value;
	snprintf(source, sizeof(source), "--%s", option->name);
	if (!dl_option_check(option, value, source, message)) {
		slurm_error("slurmdl: %s", message);
		return -1;
	}
	setenv(option->variable, value, 1);
	if (index == DL_OPT_STRATEGY || index == DL_OPT_PS)
		settle(index, value);
	return 0;
}

/* The host file is of this step alone: its tasks may start steps of their own. */
void dl_client_post_opt(void)
{
	if (hostfile >= 0) {
		close(hostfile);
		unsetenv("SLURM_HOSTFILE");
	}
	hostfile = -1;
}
