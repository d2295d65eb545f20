#define _GNU_SOURCE
#include "ranks.h"

#include <string.h>

const char *dl_error_text(enum dl_error error)
{
	switch (error) {
	case DL_OK:
		return "no error";
	case DL_TOO_LONG:
		return "too long";
	case DL_BAD_NUMBER:
		return "expected a number";
	case DL_BAD_ORDER:
		return "ranks not ascending";
	case DL_BAD_RANK:
		return "rank outside the step";
	case DL_BAD_NAME:
		return "expected a name";
	case DL_BAD_ITEM:
		return "malformed";
	}
	return "malformed";
}

bool dl_span_is(struct dl_span span, const char *text)
{
	return strlen(text) == span.length && !memcmp(span.at, text, span.length);
}

/* Parse the number at *at and advance *at. */
static enum dl_error number(const char **at, const char *end, uint32_t *value)
{
	const char *start = *at;
	*value = 0;
	while (*at < end && **at >= '0' && **at <= '9') {
		if (*at - start == 9)
			return DL_TOO_LONG;
		*value = *value * 10 + (uint32_t)(*(*at)++ - '0');
	}
	return *at == start ? DL_BAD_NUMBER : DL_OK;
}

enum dl_error dl_find_rank(struct dl_span list, uint32_t size, uint32_t rank, struct dl_position *position)
{
	const char *at = list.at, *end = list.at + list.length;
	uint64_t lowest = 0; /* lower bound of the next rank */
	*position = (struct dl_position){0};

	if (list.length > DL_TEXT_MAX)
		return DL_TOO_LONG;
	while (at < end) {
		uint32_t low, high;
		enum dl_error error = number(&at, end, &low);
		if (error)
			return error;
		high = low;
		if (at < end && *at == '-') {
			at++;
			error = number(&at, end, &high);
			if (error)
				return error;
		}
		if (low < lowest || high < low)
			return DL_BAD_ORDER;
		if (high >= size)
			return DL_BAD_RANK;
		if (rank >= low && rank <= high) {
			position->in = true;
			position->rank = position->count + (rank - low);
		} else if (high < rank) {
			position->rank += high - low + 1;
		}
		position->count += high - low + 1;
		lowest = (uint64_t)high + 1;
		if (at < end && (*at++ != ',' || at == end))
			return DL_BAD_ITEM;
	}
	return DL_OK;
}

enum dl_error dl_name_of(const char *text, uint32_t size, uint32_t rank, struct dl_span *name, uint32_t *index)
{
	name->at = text;
	name->length = 0;
	*index = 0;
	if (strnlen(text, DL_TEXT_MAX + 1) > DL_TEXT_MAX)
		return DL_TOO_LONG;
	while (*text) {
		struct dl_position position;
		size_t all = strcspn(text, ";"), length = strcspn(text, ":;");
		if (length == all)
			return DL_BAD_ITEM;
		if (!length)
			return DL_BAD_NAME;
		if (length > DL_NAME_MAX)
			return DL_TOO_LONG;
		enum dl_error error =
			dl_find_rank((struct dl_span){text + length + 1, all - length - 1}, size, rank, &position);
		if (error)
			return error;
		if (position.in && !name->length) {
			*name = (struct dl_span){text, length};
			*index = position.rank;
		}
		text += all + (text[all] == ';');
	}
	return DL_OK;
}

/* Characters of host names; srun would read brackets as a list and a newline as another rank. */
static const char name_characters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";

enum dl_error dl_next_nodes(const char **at, struct dl_span *node, uint32_t *repeats)
{
	const char *text = *at;
	*node = (struct dl_span){text, strspn(text, name_characters)};
	*repeats = 1;
	if (!node->length)
		return DL_BAD_NAME;
	if (node->length > DL_NAME_MAX)
		return DL_TOO_LONG;
	text += node->length;
	if (*text == '(') {
		if (text[1] != 'x')
			return DL_BAD_ITEM;
		text += 2;
		enum dl_error error = number(&text, text + strnlen(text, 16), repeats);
		if (error)
			return error;
		if (!*repeats || *text != ')')
			return DL_BAD_ITEM;
		text++;
	}
	if (*text && (*text != ',' || !text[1]))
		return DL_BAD_ITEM;
	*at = text + (*text == ',');
	return DL_OK;
}

enum dl_error dl_count_nodes(const char *text, uint32_t *size)
{
	*size = 0;
	if (strnlen(text, DL_TEXT_MAX + 1) > DL_TEXT_MAX)
		return DL_TOO_LONG;
	do {
		struct dl_span node;
		uint32_t repeats;
		enum dl_error error = dl_next_nodes(&text, &node, &repeats);
		if (error)
			return error;
		if (repeats > DL_RANKS_MAX - *size)
			return DL_TOO_LONG;
		*size += repeats;
	} while (*text);
	return DL_OK;
}

enum dl_error dl_node_of(const char *text, uint32_t rank, struct dl_span *node)
{
	uint32_t size;
	enum dl_error error = dl_count_nodes(text, &size);
	*node = (struct dl_span){text, 0};
	if (error || rank >= size)
		return error;
	uint32_t repeats = 0;
	for (uint32_t first = 0; first <= rank && !error; first += repeats)
		error = dl_next_nodes(&text, node, &repeats);
	return error;
}
