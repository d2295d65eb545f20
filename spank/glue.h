/* What the contexts share. Only plugin.c, client.c and remote.c know of Slurm. */
#ifndef SLURMDL_GLUE_H
#define SLURMDL_GLUE_H

#include "core/options.h"
#include "core/task.h"

#include <slurm/spank.h>

/* The value behind DL_OPTIONS: --dl-map, of srun only, as a map is of one step. */
#define DL_OPT_MAP DL_OPTIONS

void dl_client_init(int srun);
int dl_client_option(int index, const char *value);

int dl_map_apply(void);
int dl_map_strict(void);
void dl_map_done(void);

void dl_remote_init(void);
void dl_remote_option(int index, const char *value);
void dl_remote_task(spank_t spank);

const char *dl_find(spank_t spank, const char *name);
uint32_t dl_item(spank_t spank, spank_item_t which);
void dl_set_all(spank_t spank, const struct dl_task *task, const struct dl_told *told);

#endif
