/* The little JSON that is needed: strings to be written, and a value of a flat object to be found. */
#include "notify.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct text text_in(char *buffer, size_t size)
{
    buffer[0] = '\0';
    return (struct text){.at = buffer, .left = size, .full = false};
}

void text_add(struct text *text, const char *format, ...)
{
    va_list values;
    if (text->full)
        return;
    va_start(values, format);
    int length = vsnprintf(text->at, text->left, format, values);
    va_end(values);
    if (length < 0 || (size_t)length >= text->left) {
        text->full = true;
        return;
    }
    text->at += length;
    text->left -= (size_t)length;
}

/* Bytes that are no ASCII are shown as '?': they might be no UTF-8, which JSON has to be. */
void text_add_json(struct text *text, const char *string)
{
    text_add(text, "\"");
    for (const unsigned char *byte = (const unsigned char *)string; *byte; byte++) {
        if (*byte == '"' || *byte == '\\')
            text_add(text, "\\%c", *byte);
        else if (*byte < 0x20)
            text_add(text, "\\u%04x", *byte);
        else
            text_add(text, "%c", *byte < 0x7f ? *byte : '?');
    }
    text_add(text, "\"");
}

static const char *skip_blank(const char *at)
{
    return at + strspn(at, " \t\r\n");
}

/* Reads the string that begins at `at`; returns what follows it, NULL when it is none or has escapes that no name or
 * address has. `value` may be NULL. */
static const char *read_string(const char *at, char *value, size_t size)
{
    size_t length = 0;
    if (*at != '"')
        return NULL;
    for (at++; *at != '"'; at++) {
        char byte = *at;
        if (byte == '\0' || (unsigned char)byte < 0x20)
            return NULL;
        if (byte == '\\') {
            byte = *++at;
            if (byte == '\0' || (value && !strchr("\"\\/", byte)))
                return NULL;
        }
        if (value && length + 1 >= size)
            return NULL;
        if (value)
            value[length++] = byte;
    }
    if (value)
        value[length] = '\0';
    return at + 1;
}

static const char *read_bare(const char *at, char *value, size_t size)
{
    size_t length = strcspn(at, ",}{[]\" \t\r\n");
    if (length == 0 || (value && length >= size))
        return NULL;
    if (value) {
        memcpy(value, at, length);
        value[length] = '\0';
    }
    return at + length;
}

/* The value of `key` in an object without objects in it. False when it is not there, or what is there is no such
 * object as far as it was read. */
bool json_find(const char *object, const char *key, char *value, size_t size, bool *is_string)
{
    char name[64];
    const char *at = skip_blank(object);
    if (*at != '{')
        return false;
    do {
        at = read_string(skip_blank(at + 1), name, sizeof name);
        if (!at)
            return false;
        at = skip_blank(at);
        if (*at != ':')
            return false;
        at = skip_blank(at + 1);
        bool wanted = strcmp(name, key) == 0;
        *is_string = *at == '"';
        at = *is_string ? read_string(at, wanted ? value : NULL, size) : read_bare(at, wanted ? value : NULL, size);
        if (!at)
            return false;
        if (wanted)
            return true;
        at = skip_blank(at);
    } while (*at == ',');
    return false;
}
