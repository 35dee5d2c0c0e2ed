#!/bin/sh
# Writes the modules of linux/ as a patch series for the kernel: make.sh FOLDER
#
# FOLDER gets the cover letter and the patches, in the form of `git format-patch`. Sources, lists of objects and texts are
# taken from this repository at each run. SERIES_AUTHOR replaces the author of git's configuration.
set -eu
linux=$(dirname "$(dirname "$(readlink -f "$0")")")
texts=$linux/series
. "$linux/../xen/series/mail.sh"

# module FOLDER OPTION PATH: prints the diffs that create the module's sources at PATH, with a Makefile made of its Kbuild.
module() {
    for file in "$linux/$1"/*.[ch]; do new_file "$3/$(basename "$file")" "$file"; done
    sed -e '/^# The headers/d' -e 's#^ccflags-y := .*#ccflags-y := -I$(srctree)/include/xen -I$(srctree)/include/xen/interface#' \
        -e "s/^obj-m := /obj-\$($2) += /" "$linux/$1/Kbuild" >"$made"
    new_file "$3/Makefile" "$made"
}

# changes NAME: prints the changes of the patch whose text is messages/NAME.txt.
changes() {
    case $1 in
    1-*)
        new_file include/xen/interface/grant_window.h "$linux/../xen/include/public/grant_window.h"
        new_file include/xen/grant_window_calls.h "$linux/include/grant_window_calls.h"
        ;;
    2-*) cat "$texts/hooks-xen.diff"; module grant-window CONFIG_XEN_GRANT_WINDOW drivers/xen/grant-window ;;
    3-*) cat "$texts/hooks-net.diff"; module netfront CONFIG_XEN_NETDEV_RINGFENCE drivers/net/xen-ringfence ;;
    *) echo "no changes belong to $1" >&2; exit 1 ;;
    esac
}

made=$(mktemp)
trap 'rm -f "$made"' EXIT
series "$1" "$texts/cover.txt" "$texts"/messages/*.txt
