/* The --dl-* options of sbatch, srun and salloc, and which of their values are valid. */
#ifndef SLURMDL_OPTIONS_H
#define SLURMDL_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

enum dl_kind { DL_CHOICE, DL_COUNT, DL_BYTES, DL_NAMES, DL_TEXT, DL_FLAG };

struct dl_option {
	const char *name;     /* "dl-model-bytes" */
	const char *variable; /* the twin in the environment, "SLURMDL_OPT_MODEL_BYTES" */
	const char *slurms;   /* the variable in which Slurm hands the option on to the steps of a job */
	enum dl_kind kind;
	const char *values; /* as the help shows them, "" for a flag; for a choice the valid ones with | between */
	const char *usage;
};

enum dl_option_index {
#define DL_OPTION(upper, lower, kind, name, values, usage) DL_OPT_##upper,
#include "options.inc"
#undef DL_OPTION
	DL_OPTIONS
};

extern const struct dl_option dl_options[DL_OPTIONS];

/* longest valid value, and the room that a message takes */
#define DL_VALUE_MAX 4096
#define DL_MESSAGE 512

/* Whether a value is valid; where not, message says in one line why, and what is. source is how the user gave it. */
bool dl_option_check(const struct dl_option *option, const char *value, const char *source, char message[DL_MESSAGE]);

/* Whether a variable switches a flag on: empty, "yes" or a number that is not 0 (sbatch(1)). */
bool dl_is_set(const char *value);

/* A whole number of at most nine digits. */
bool dl_number(const char *text, unsigned *number);

/* text for a message: printable, and cut where it is long */
#define DL_SHOWN 64
const char *dl_shown(const char *text, size_t length, char room[DL_SHOWN]);

#endif
