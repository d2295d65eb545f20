#define _GNU_SOURCE
#include "options.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct dl_option dl_options[DL_OPTIONS] = {
#define DL_OPTION(upper, lower, kind, name, values, usage)                                                     \
	[DL_OPT_##upper] = {name, "SLURMDL_OPT_" #upper, "SLURM_SPANK__SLURM_SPANK_OPTION_slurmdl_dl_" #lower, \
			    kind, values, usage},
#include "options.inc"
#undef DL_OPTION
};

static const char digits[] = "0123456789";

bool dl_number(const char *text, unsigned *number)
{
	size_t length = strspn(text, digits);
	if (length < 1 || length > 9 || text[length])
		return false;
	*number = (unsigned)strtoul(text, NULL, 10);
	return true;
}

bool dl_is_set(const char *value)
{
	if (!*value || !strcmp(value, "yes"))
		return true;
	value += strspn(value, "+-");
	size_t length = strspn(value, digits);
	return length && !value[length] && strspn(value, "0") < length;
}

const char *dl_printable(const char *text, size_t length, char buf[DL_PRINTABLE])
{
	bool cut = length > DL_PRINTABLE - 4;
	size_t end = cut ? DL_PRINTABLE - 4 : length;
	for (size_t i = 0; i < end; i++)
		buf[i] = text[i] >= ' ' && text[i] < 127 ? text[i] : '?';
	strcpy(buf + end, cut ? "..." : "");
	return buf;
}

static bool is_choice(const char *values, const char *value)
{
	size_t length = strlen(value);
	while (length) {
		size_t each = strcspn(values, "|");
		if (each == length && !memcmp(values, value, length))
			return true;
		if (!values[each])
			return false;
		values += each + 1;
	}
	return false;
}

static void list_choices(const char *values, char *buf, size_t size)
{
	size_t at = 0;
	for (; *values && at + 3 < size; values++) {
		buf[at++] = *values == '|' ? ',' : *values;
		if (*values == '|')
			buf[at++] = ' ';
	}
	buf[at] = '\0';
}

bool dl_option_check(const struct dl_option *option, const char *value, const char *source, char message[DL_MESSAGE])
{
	bool valid = true;
	unsigned number;
	const char *expected = option->values;
	char choices[128], shown[DL_PRINTABLE];
	size_t length = strnlen(value, DL_VALUE_MAX + 1);

	switch (option->kind) {
	case DL_CHOICE:
		valid = is_choice(option->values, value);
		list_choices(option->values, choices, sizeof(choices));
		expected = choices;
		break;
	case DL_COUNT:
		valid = dl_number(value, &number);
		expected = "a whole number, 0 or more";
		break;
	case DL_NAMES:
		valid = value[strspn(value, ",")] != '\0';
		expected = "names separated by commas";
		break;
	case DL_TEXT:
		valid = *value != '\0';
		break;
	case DL_FLAG:
		return true;
	}
	if (length > DL_VALUE_MAX) {
		valid = false;
		expected = "a shorter value";
	}
	if (!valid)
		snprintf(message, DL_MESSAGE, "%s: invalid value '%s'; expected %s", source,
			 dl_printable(value, length, shown), expected);
	return valid;
}
