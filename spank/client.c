/* sbatch, salloc and srun: check the options and pass them to the job as SLURMDL_OPT_*. Reads only the command line and
 * the environment, starts no process. */
#include "plugin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In Slurm's precedence the environment overrides the script, the command line both. Slurm reads the options of plugins
 * from variables under its own names, so SLURMDL_OPT_* is copied to those. */
void dl_client_init(int srun)
{
	for (int i = 0; i < DL_OPTIONS; i++) {
		const char *value = getenv(dl_options[i].variable);
		if (value && dl_options[i].kind == DL_FLAG && !dl_is_set(value))
			unsetenv(dl_options[i].spank_variable);
		else if (value)
			setenv(dl_options[i].spank_variable, value, 1);
	}
	if (srun) { /* --dl-rank-map is valid on a command line only and never inherited */
		unsetenv("SLURM_SPANK__SLURM_SPANK_OPTION_slurmdl_dl_rank_map");
		unsetenv("_SLURM_SPANK_OPTION_slurmdl_dl_rank_map");
	}
}

/* Parameter servers and another strategy are exclusive: the later option wins, and of two environment variables the
 * strategy. The losing option is overridden in the job, too, as Slurm passes all given options to it. */
static void resolve_strategy_conflict(int index, const char *value)
{
	const char *strategy = getenv(dl_options[DL_OPT_STRATEGY].variable);
	const char *servers = getenv(dl_options[DL_OPT_PS].variable);
	const char *shown = getenv(dl_options[DL_OPT_PS].spank_variable);
	char message[DL_MESSAGE];
	unsigned count = 0;
	if (!strategy || !strcmp(strategy, "ps") || !servers || !dl_number(servers, &count) || !count)
		return;
	if (!dl_option_check(&dl_options[DL_OPT_STRATEGY], strategy, "", message))
		return; /* an invalid variable; rejected when it is processed itself */
	if (index == DL_OPT_PS && !(shown && !strcmp(shown, value))) {
		slurm_spank_log("slurmdl: --dl-ps=%u: the strategy is ps instead of %s", count, strategy);
		setenv(dl_options[DL_OPT_STRATEGY].variable, "ps", 1);
	} else {
		slurm_spank_log("slurmdl: --dl-strategy=%s has no parameter servers: --dl-ps=%u is ignored", strategy, count);
		setenv(dl_options[DL_OPT_PS].variable, "0", 1);
	}
}

int dl_client_option(int index, const char *value)
{
	char message[DL_MESSAGE], source[96];
	if (index == DL_OPT_RANK_MAP)
		return dl_rank_map_apply();
	const struct dl_option *option = &dl_options[index];
	value = option->kind == DL_FLAG || !value ? "" : value;
	snprintf(source, sizeof(source), "--%s", option->name);
	if (!dl_option_check(option, value, source, message)) {
		slurm_error("slurmdl: %s", message);
		return -1;
	}
	setenv(option->variable, value, 1);
	if (index == DL_OPT_STRATEGY || index == DL_OPT_PS)
		resolve_strategy_conflict(index, value);
	return index == DL_OPT_STRICT ? dl_rank_map_strict() : 0;
}
