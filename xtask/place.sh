#!/bin/sh
# Makes a checkout at an unusual place and runs a command in it: place.sh KIND FOLDER CHECKOUT ROOT COMMAND...
#
# KIND is a part of the step `place` (xtask/src/steps/places.rs). FOLDER is an empty directory; CHECKOUT, in it, becomes a clone of
# ROOT. Root runs this script in a mount namespace.
set -eu
kind=$1 folder=$2 checkout=$3 root=$4
shift 4
if [ $kind = tmpfs ] && [ $(id -u) = 0 ]; then
    mount -t tmpfs -o size=8g place "$folder"
fi
GIT_CONFIG_GLOBAL="$root/xtask/gitconfig" git clone --quiet "$root" "$checkout"
if [ $kind = read-only ]; then
    export CARGO_TARGET_DIR="$folder/target"
    if [ $(id -u) = 0 ]; then
        mount --bind "$checkout" "$checkout"
        mount -o remount,bind,ro "$checkout"
        ! touch "$checkout/README.md" 2>/dev/null || { echo 'the source is not read-only'; exit 1; }
    else
        chmod -R a-w "$checkout"
    fi
fi
cd "$checkout"
exec "$@"
