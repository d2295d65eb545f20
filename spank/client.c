/* sbatch, salloc and srun: options are checked and go to the job as SLURMDL_OPT_*. Reads the command line and the
 * environment only, starts nothing. */
#include "glue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

int dl_client_option(int index, const char *value)
{
	char message[DL_MESSAGE], source[96];
	if (index == DL_OPT_MAP)
		return dl_map_apply();
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
	return index == DL_OPT_STRICT ? dl_map_strict() : 0;
}
