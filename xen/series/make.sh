#!/bin/sh
# Writes the hypervisor's part of grant windows as a patch series for Xen: make.sh VERSION FOLDER
#
# VERSION is a folder of xen/patches, such as 4.20. FOLDER gets the cover letter and the patches, in the form of
# `git format-patch`. Sources, hooks and texts are taken from xen/ at each run, so the series cannot differ from the
# hypervisor that is built and tested. SERIES_AUTHOR replaces the author of git's configuration.
set -eu
version=$1 folder=$2
xen=$(dirname "$(dirname "$(readlink -f "$0")")")
texts=$xen/series
hooks=$xen/patches/$version
[ -d "$hooks" ] || { echo "there are no hooks for Xen $version in xen/patches" >&2; exit 1; }
. "$texts/mail.sh"

# sources PATH...: prints the diffs that create these files below xen/.
sources() {
    for path in "$@"; do new_file "xen/$path" "$xen/$path"; done
}

# hook NAME: prints the changes of one of our patches, without its title.
hook() {
    sed -n '/^diff --git /,$p' "$hooks"/"$1"-*.patch
}

# changes NAME: prints the changes of the patch whose text is messages/NAME.txt.
changes() {
    case $1 in
    1-*) sources include/public/grant_window.h include/xen/grant_window.h ;;
    2-*) hook 0001; sources arch/x86/include/asm/p2m-window.h arch/x86/mm/p2m-window.c ;;
    3-*) hook 0002 ;;
    4-*) hook 0003; sources common/grant_window.c ;;
    5-*) new_file docs/designs/grant-windows.md "$texts/grant-windows.md" ;;
    6-*) cat "$texts/netif-revision-5.diff" ;;
    *) echo "no changes belong to $1" >&2; exit 1 ;;
    esac
}

series "$folder" "$texts/cover.txt" "$texts"/messages/*.txt
