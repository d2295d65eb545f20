/* slurmstepd, in the child that becomes a task, as the job's user: the variables that differ per task. What Slurm
 * tells and what the step's environment holds is all that is read, and nothing here can fail a task. */
#include "core/task.h"
#include "glue.h"

#include <slurm/slurm.h>
#include <stdio.h>
#include <string.h>

/* options of the step, "" for a flag; set before the tasks are forked */
static char given[DL_OPTIONS + 1][DL_VALUE_MAX + 1];
static bool is_given[DL_OPTIONS + 1];

void dl_remote_init(void)
{
	memset(is_given, 0, sizeof(is_given));
}

void dl_remote_option(int index, const char *value)
{
	char message[DL_MESSAGE];
	value = value ? value : "";
	if (index < DL_OPT_MAP && dl_options[index].kind != DL_FLAG) {
		if (!dl_option_check(&dl_options[index], value, dl_options[index].name, message))
			return;
		strcpy(given[index], value);
	}
	is_given[index] = true;
}

/* Gives the task the options that its environment lacks, as --export keeps only some names. Whether there are any. */
static bool hand_on_options(spank_t spank)
{
	bool any = is_given[DL_OPT_MAP];
	for (int i = 0; i < DL_OPTIONS; i++) {
		const char *value = is_given[i] ? given[i] : dl_find(spank, dl_options[i].slurms);
		if (value && dl_options[i].kind == DL_FLAG)
			value = "";
		if (value && !dl_find(spank, dl_options[i].variable))
			spank_setenv(spank, dl_options[i].variable, value, 0);
		any = any || value || dl_find(spank, dl_options[i].variable);
	}
	return any;
}

/* An option's value, NULL where it is not given or not valid. */
static const char *valid(spank_t spank, int index)
{
	char message[DL_MESSAGE];
	const char *value = dl_find(spank, dl_options[index].variable);
	return value && dl_option_check(&dl_options[index], value, "", message) ? value : NULL;
}

/* What the components of a heterogeneous step have in common is in their environment alone. */
static uint32_t in_all(spank_t spank, const char *name, spank_item_t component)
{
	const char *text = dl_find(spank, name);
	uint32_t value;
	return text && dl_number(text, &value) ? value : dl_item(spank, component);
}

/* One line for the user from rank 0, and on what only a task itself can see from the first nodes. */
static void warn(spank_t spank, const struct dl_task *task, const struct dl_told *told)
{
	uint32_t node = dl_item(spank, S_JOB_NODEID);
	int local = 0;
	bool first = !spank_get_item(spank, S_TASK_ID, &local) && local == 0;
	if (told->doubt[0] && (told->local ? first && node < 4 : task->rank == 0))
		slurm_spank_log("slurmdl: %s", told->doubt);
}

void dl_remote_task(spank_t spank)
{
	static struct dl_told told;
	bool asked = hand_on_options(spank);
	struct dl_task task = {
		.rank = in_all(spank, "SLURM_PROCID", S_TASK_GLOBAL_ID),
		.size = in_all(spank, "SLURM_STEP_NUM_TASKS", S_JOB_TOTAL_TASK_COUNT),
		.step = dl_item(spank, S_JOB_STEPID),
		.strategy = valid(spank, DL_OPT_STRATEGY), .servers = valid(spank, DL_OPT_PS), .mapped = is_given[DL_OPT_MAP],
		.map_size = dl_find(spank, "SLURMDL_SIZE"), .ps_ranks = dl_find(spank, "SLURMDL_PS_RANKS"),
		.zone_ranks = dl_find(spank, "SLURMDL_ZONE_RANKS"), .master = dl_find(spank, "SLURMDL_MASTER"),
		.port = dl_find(spank, "SLURMDL_PORT"), .nodes = dl_find(spank, "SLURMDL_MAP_NODES"),
		.node = dl_find(spank, "SLURMD_NODENAME"), .address = dl_find(spank, "SLURM_TOPOLOGY_ADDR"),
		.distribution = dl_find(spank, "SLURM_DISTRIBUTION")};

	/* batch scripts and the like are no ranks; behind `slurmdl srun` a shell before the program sets all this */
	if (task.step > SLURM_MAX_NORMAL_STEP_ID || dl_find(spank, "SLURMDL_TASK"))
		return;
	if (!asked && !dl_find(spank, "SLURMDL_SET"))
		return;
	dl_tell(&task, &told);
	warn(spank, &task, &told);
	dl_set_all(spank, &task, &told);
}
