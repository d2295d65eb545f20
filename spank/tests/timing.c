/* The plugin with timed callbacks, for `python -m benchmarks.spank_overhead`: SLURMDL_SPANK_NS of each task holds the
 * nanoseconds spent in srun and in slurmstepd. As a control, an argument N in plugstack.conf adds a sleep of N
 * microseconds per task. */
#include "../plugin.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef int callback(spank_t spank, int ac, char **av);

callback plain_init, plain_init_post_opt, plain_task_init;
static unsigned long long spent;

static unsigned long long now(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return (unsigned long long)at.tv_sec * 1000000000u + (unsigned long long)at.tv_nsec;
}

static int timed_option(int index, const char *value)
{
	unsigned long long began = now();
	int status = dl_client_option(index, value);
	spent += now() - began;
	return status;
}

#define dl_client_option timed_option
#define slurm_spank_init plain_init
#define slurm_spank_init_post_opt plain_init_post_opt
#define slurm_spank_task_init plain_task_init
#include "../plugin.c"
#undef slurm_spank_init
#undef slurm_spank_init_post_opt
#undef slurm_spank_task_init

static int timed(callback *each, spank_t spank, int ac, char **av)
{
	unsigned long long began = now();
	int status = each(spank, ac, av);
	spent += now() - began;
	return status;
}

int slurm_spank_init(spank_t spank, int ac, char **av)
{
	return timed(plain_init, spank, ac, av);
}

int slurm_spank_init_post_opt(spank_t spank, int ac, char **av)
{
	char text[32];
	int status = timed(plain_init_post_opt, spank, ac, av);
	if (spank_context() == S_CTX_LOCAL) {
		snprintf(text, sizeof(text), "%llu", spent);
		setenv("SLURMDL_SPANK_NS_SRUN", text, 1);
	}
	return status;
}

static int sleep_and_init(spank_t spank, int ac, char **av)
{
	if (ac > 0)
		usleep((useconds_t)atoi(av[0]));
	return plain_task_init(spank, ac, av);
}

int slurm_spank_task_init(spank_t spank, int ac, char **av)
{
	char text[64];
	const char *srun;
	int status = timed(sleep_and_init, spank, ac, av);
	srun = dl_getenv(spank, "SLURMDL_SPANK_NS_SRUN");
	snprintf(text, sizeof(text), "%s %llu", srun ? srun : "0", spent);
	spank_setenv(spank, "SLURMDL_SPANK_NS", text, 1);
	return status;
}
