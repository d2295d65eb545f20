/* Callbacks by context. All but the option callback always return 0: a failure in slurmstepd would drain the node, one
 * in srun or sbatch would fail the job. */
#include "plugin.h"

#include <stdio.h>

SPANK_PLUGIN(slurmdl, 1)

/* In sbatch, salloc and srun (remote is 0), and in slurmstepd (remote is 1). An invalid value fails the submission;
 * slurmstepd ignores it. */
static int option(int index, const char *value, int remote)
{
	if (!remote)
		return dl_client_option(index, value);
	dl_remote_option(index, value);
	return 0;
}

static void offer(spank_t spank, int index, const char *name, const char *values, const char *usage)
{
	char help[256];
	snprintf(help, sizeof(help), "[slurmdl] %s", usage);
	struct spank_option each = {(char *)name, *values ? (char *)values : NULL, help, *values != '\0', index, option};
	/* Slurm copies the structure */
	spank_err_t error = spank_option_register(spank, &each);
	if (error)
		slurm_error("slurmdl: --%s: %s", name, spank_strerror(error));
}

/* In every process that loads the plugin: in sbatch, salloc and srun before they parse options, in slurmstepd as root
 * before the job's user is known, in slurmd, and before a prolog. */
int slurm_spank_init(spank_t spank, int ac, char **av)
{
	(void)ac;
	(void)av;
	spank_context_t context = spank_context();
	if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
		return 0;
	for (int i = 0; i < DL_OPTIONS; i++)
		offer(spank, i, dl_options[i].name, dl_options[i].values, dl_options[i].usage);
	if (context != S_CTX_ALLOCATOR)
		offer(spank, DL_OPT_RANK_MAP, "dl-rank-map", "", "start the tasks in the order of the job's rank map");
	if (context == S_CTX_REMOTE)
		dl_remote_init();
	else
		dl_client_init(context == S_CTX_LOCAL);
	return 0;
}

/* In sbatch, salloc and srun after they parsed options; in slurmstepd before it switches to the user. */
int slurm_spank_init_post_opt(spank_t spank, int ac, char **av)
{
	(void)spank;
	(void)ac;
	(void)av;
	if (spank_context() == S_CTX_LOCAL)
		dl_rank_map_done();
	return 0;
}

/* In a child of slurmstepd, once per task, as the job's user, just before it executes the task's program. */
int slurm_spank_task_init(spank_t spank, int ac, char **av)
{
	(void)ac;
	(void)av;
	if (spank_context() == S_CTX_REMOTE)
		dl_remote_task(spank);
	return 0;
}
