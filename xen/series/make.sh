#!/bin/sh
# Writes the hypervisor's part of grant windows as a patch series for Xen: make.sh VERSION FOLDER
#
# VERSION is a folder of xen/patches, such as 4.20. FOLDER gets the cover letter and the patches, in the form of
# `git format-patch`. Sources, hooks and texts are taken from xen/ at each run, so the series cannot differ from the
# hypervisor that is built and tested. SERIES_AUTHOR replaces the author of git's configuration.
set -eu
version=$1 folder=$2
xen=$(dirname "$(dirname "$(readlink -f "$0")")")
series=$xen/series
hooks=$xen/patches/$version
author=${SERIES_AUTHOR:-$(git config user.name) <$(git config user.email)>}
count=$(find "$series/messages" -name '*.txt' | wc -l)
[ -d "$hooks" ] || { echo "there are no hooks for Xen $version in xen/patches" >&2; exit 1; }
mkdir -p "$folder"
rm -f "$folder"/*.patch

# new_file PATH SOURCE: prints the diff that creates a file of Xen's source from a file of ours.
new_file() {
    printf 'diff --git a/%s b/%s\nnew file mode 100644\n--- /dev/null\n+++ b/%s\n@@ -0,0 +1,%d @@\n' \
        "$1" "$1" "$1" "$(wc -l <"$2")"
    sed 's/^/+/' "$2"
}

# sources PATH...: prints the diffs that create these files below xen/.
sources() {
    for path in "$@"; do new_file "xen/$path" "$xen/$path"; done
}

# hook NAME: prints the changes of one of our patches, without its title.
hook() {
    sed -n '/^diff --git /,$p' "$hooks"/"$1"-*.patch
}

# mail NUMBER TEXT: prints a patch with the title and text of the file TEXT; its changes are on standard input.
mail() {
    printf 'From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\nFrom: %s\n' "$author"
    printf 'Date: %s\nSubject: [PATCH %s/%s] %s\n' "${SERIES_DATE:-$(date -R)}" "$1" "$count" "$(head -n 1 "$2")"
    sed 1d "$2"
    if [ "$1" = 0 ]; then
        cat
    else
        printf '\nSigned-off-by: %s\n---\n' "$author"
        cat
    fi
    printf -- '-- \n'
}

# changes NAME: prints the changes of the patch whose text is messages/NAME.txt.
changes() {
    case $1 in
    1-*) sources include/public/grant_window.h include/xen/grant_window.h ;;
    2-*) hook 0001; sources arch/x86/include/asm/p2m-window.h arch/x86/mm/p2m-window.c ;;
    3-*) hook 0002 ;;
    4-*) hook 0003; sources common/grant_window.c ;;
    5-*) new_file docs/designs/grant-windows.md "$series/grant-windows.md" ;;
    6-*) cat "$series/netif-revision-5.diff" ;;
    *) echo "no changes belong to $1" >&2; exit 1 ;;
    esac
}

printf '' | mail 0 "$series/cover.txt" >"$folder/0000-cover-letter.patch"
for text in "$series"/messages/*.txt; do
    name=$(basename "$text" .txt)
    changes "$name" >"$folder/changes"
    mail "${name%%-*}" "$text" <"$folder/changes" >"$folder/000$name.patch"
done
rm "$folder/changes"
