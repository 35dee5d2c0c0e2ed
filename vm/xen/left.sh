# What is left of a domain, for those who look after it was destroyed. Sourced by lib.sh.

# grants_in_use DOMAIN: the pages of a domain that others have mapped, but for those of its console
# and its store (references 0 and 1), as the hypervisor's debug key `g` tells; one a line.
grants_in_use() {
    xl dmesg -c >/dev/null
    xl debug-keys g
    xl dmesg | awk -v name=d$1 '
        /grant-table for remote/ { ours = 0; for (i = 1; i <= NF; i++) if ($i == name) ours = 1 }
        ours && /\[0x[0-9a-f]*\]/ && !/\[0x00[01]\]/ { sub(/^\(XEN\) */, ""); print }'
}

# channels_to DOMAIN: the ports of dom0 that lead to it, one a line.
channels_to() {
    lsevtchn 0 | grep "Remote Domain $1,"
}

# is_there, is_not_there DOMAIN: whether the hypervisor has it, if only because something of it is
# still mapped.
is_there() {
    xl list | awk -v id=$1 '$2 == id { found = 1 } END { exit !found }'
}
is_not_there() {
    ! is_there $1
}

# nothing_left DOMAIN: neither itself, nor a page that is mapped, nor a channel to it.
nothing_left() {
    is_not_there $1 && [ -z "$(grants_in_use $1)" ] && [ -z "$(channels_to $1)" ]
}
