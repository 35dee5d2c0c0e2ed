#!/bin/sh
# Applies the series to a source of Xen and compares the result with our sources: check.sh SOURCE VERSION
#
# SOURCE is an unpacked source of Xen VERSION; it is not changed. Each patch must apply alone, in its order, without
# fuzz, and the result must have our files and our hooks.
set -eu
source=$1 version=$2
xen=$(dirname "$(dirname "$(readlink -f "$0")")")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

sh "$xen/series/make.sh" "$version" "$folder/series"
# The files that the series changes, as they are in the source.
sed -n 's#^diff --git a/\([^ ]*\) .*#\1#p' "$folder"/series/*.patch | sort -u >"$folder/files"
for tree in applied built; do
    while read -r file; do
        mkdir -p "$folder/$tree/$(dirname "$file")"
        [ ! -e "$source/$file" ] || cp "$source/$file" "$folder/$tree/$file"
    done <"$folder/files"
done
for patch in "$folder"/series/000[1-9]-*.patch; do
    patch -d "$folder/applied" -p1 --fuzz=0 --no-backup-if-mismatch --batch -s -i "$patch"
    echo "applies: $(sed -n 's/^Subject: //p' "$patch")"
done
# The tree that `cargo xtask xen build` makes, with the two texts that it does not need.
for part in arch common include; do cp -r "$xen/$part" "$folder/built/xen/"; done
for patch in "$xen/patches/$version"/*.patch "$xen/series/netif-revision-5.diff"; do
    patch -d "$folder/built" -p1 --no-backup-if-mismatch --batch -s -i "$patch"
done
mkdir -p "$folder/built/docs/designs"
cp "$xen/series/grant-windows.md" "$folder/built/docs/designs/"
diff -r "$folder/applied" "$folder/built"
echo 'the series makes the tree that is built'
