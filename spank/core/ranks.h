/* Readers of the folded rank lists in which the environment holds a map. They read in place, within bounds, without
 * allocation, and always to the end of the text, so that malformed text is always detected. */
#ifndef SLURMDL_RANKS_H
#define SLURMDL_RANKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DL_TEXT_MAX (128 * 1024) /* kernel limit for one variable */
#define DL_RANKS_MAX 1000000
#define DL_NAME_MAX 255

enum dl_error {
	DL_OK = 0,
	DL_TOO_LONG,   /* text, name or number of ranks too long */
	DL_BAD_NUMBER, /* not a number */
	DL_BAD_ORDER,  /* ranks not ascending */
	DL_BAD_RANK,   /* rank outside the step */
	DL_BAD_NAME,   /* empty name or invalid character */
	DL_BAD_ITEM,   /* any other malformed item */
};

const char *dl_error_text(enum dl_error error);

/* A substring without a terminating NUL. */
struct dl_span {
	const char *at;
	size_t length;
};

/* Position of a rank in a list such as 0,4-5. */
struct dl_position {
	bool in;        /* the list contains the rank */
	uint32_t rank;  /* its index in the list, or else the number of lower ranks in the list */
	uint32_t count; /* ranks in the list */
};

/* Find a rank in a list of ascending ranks below size: 0,4-5. The empty list is valid. */
enum dl_error dl_find_rank(struct dl_span list, uint32_t size, uint32_t rank, struct dl_position *position);

/* The name whose list has the rank, in leafA:0-3;leafB:4,6; and the index of the rank there; length 0 if none has it. */
enum dl_error dl_name_of(const char *text, uint32_t size, uint32_t rank, struct dl_span *name, uint32_t *index);

/* Iterate over n2,n1(x2),n3, the nodes of ranks 0, 1-2 and 3. *at is the unread text, "" at the end. */
enum dl_error dl_next_nodes(const char **at, struct dl_span *node, uint32_t *repeats);

/* Number of ranks in such a text; an empty text is malformed. */
enum dl_error dl_count_nodes(const char *text, uint32_t *size);

/* Node of a rank in such a text; length 0 if the text ends before it. */
enum dl_error dl_node_of(const char *text, uint32_t rank, struct dl_span *node);

bool dl_span_is(struct dl_span span, const char *text);

#endif
