/* Interfaces between the contexts. core/ does not depend on Slurm. */
#ifndef SLURMDL_PLUGIN_H
#define SLURMDL_PLUGIN_H

#include "core/options.h"
#include "core/task.h"

#include <slurm/spank.h>

/* --dl-rank-map, an option of srun only, because a map belongs to one step. */
#define DL_OPT_RANK_MAP DL_OPTIONS

void dl_client_init(int srun);
int dl_client_option(int index, const char *value);

int dl_rank_map_apply(void);
int dl_rank_map_strict(void);
void dl_rank_map_done(void);

void dl_remote_init(void);
void dl_remote_option(int index, const char *value);
void dl_remote_task(spank_t spank);

const char *dl_getenv(spank_t spank, const char *name);
uint32_t dl_spank_item(spank_t spank, spank_item_t which);
void dl_export_task_env(spank_t spank, const struct dl_task *task, const struct dl_task_env *env);

#endif
