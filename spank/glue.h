/* What the contexts share. Only plugin.c, client.c and remote.c know of Slurm. */
#ifndef SLURMDL_GLUE_H
#define SLURMDL_GLUE_H

#include "core/options.h"

#include <slurm/spank.h>

/* The value behind DL_OPTIONS: --dl-map, of srun only, as a map is of one step. */
#define DL_OPT_MAP DL_OPTIONS

void dl_client_init(int srun);
int dl_client_option(int index, const char *value);
void dl_client_post_opt(void);

void dl_remote_init(void);
void dl_remote_option(int index, const char *value);
void dl_remote_task(spank_t spank);

#endif
