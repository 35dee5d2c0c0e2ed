# Helpers that write a patch series, for xen/series/make.sh and linux/series/make.sh.

author=${SERIES_AUTHOR:-$(git config user.name) <$(git config user.email)>}

# new_file PATH SOURCE: prints the diff that creates a file from a file of ours.
new_file() {
    printf 'diff --git a/%s b/%s\nnew file mode 100644\n--- /dev/null\n+++ b/%s\n@@ -0,0 +1,%d @@\n' \
        "$1" "$1" "$1" "$(wc -l <"$2")"
    sed 's/^/+/' "$2"
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

# series FOLDER COVER TEXT...: writes the cover letter and a patch for each text. Its changes are what `changes NAME` of the
# caller prints, NAME being the text's name without .txt; it begins with the patch's number.
series() {
    folder=$1 cover=$2
    shift 2
    count=$#
    mkdir -p "$folder"
    rm -f "$folder"/*.patch
    mail 0 "$cover" </dev/null >"$folder/0000-cover-letter.patch"
    for text in "$@"; do
        name=$(basename "$text" .txt)
        changes "$name" >"$folder/changes"
        mail "${name%%-*}" "$text" <"$folder/changes" >"$folder/000$name.patch"
    done
    rm "$folder/changes"
}
