/* The --dl-* options of sbatch, srun and salloc, and checks of their values. */
#ifndef SLURMDL_OPTIONS_H
#define SLURMDL_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

enum dl_kind {
	DL_CHOICE,
	DL_COUNT,
	DL_NAMES,
	DL_TEXT,
	DL_FLAG
};

struct dl_option {
	const char *name;           /* "dl-link-scores" */
	const char *variable;       /* environment variable, "SLURMDL_OPT_LINK_SCORES" */
	const char *spank_variable; /* variable in which Slurm passes the option to the steps of a job */
	enum dl_kind kind;
	const char *values; /* as in the help, "" for a flag; for a choice the valid values separated by | */
	const char *usage;
};

enum dl_option_index {
#define DL_OPTION(upper, lower, kind, name, values, usage) DL_OPT_##upper,
#include "options.inc"
#undef DL_OPTION
	DL_OPTIONS
};

extern const struct dl_option dl_options[DL_OPTIONS];

/* length of the longest valid value; size of a message */
#define DL_VALUE_MAX 4096
#define DL_MESSAGE 512

/* Check a value; if it is invalid, write one line to message. source is the option or variable as the user wrote it. */
bool dl_option_check(const struct dl_option *option, const char *value, const char *source, char message[DL_MESSAGE]);

/* Whether a variable sets a flag: empty, "yes" or a number other than 0 (sbatch(1)). */
bool dl_is_set(const char *value);

/* A whole number of at most nine digits. */
bool dl_number(const char *text, unsigned *number);

/* text for a message: printable and truncated */
#define DL_PRINTABLE 64
const char *dl_printable(const char *text, size_t length, char buf[DL_PRINTABLE]);

#endif
