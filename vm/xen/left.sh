# Remains of a domain that was destroyed. Sourced by lib.sh and by lib/run.sh.

# grants_in_use DOMAIN: prints the pages of a domain that other domains have mapped, one a line, by the hypervisor's
# debug key `g`. References 0 and 1 are left out: the pages of console and store.
grants_in_use() {
    xl dmesg -c >/dev/null
    xl debug-keys g
    xl dmesg | awk -v name=d$1 '
        /grant-table for remote/ { ours = 0; for (i = 1; i <= NF; i++) if ($i == name) ours = 1 }
        ours && /\[0x[0-9a-f]*\]/ && !/\[0x00[01]\]/ { sub(/^\(XEN\) */, ""); print }'
}

# channels_to DOMAIN: prints the ports of dom0 that lead to a domain, one a line.
channels_to() {
    lsevtchn 0 | grep "Remote Domain $1,"
}

# domain_exists DOMAIN: succeeds if the hypervisor has the domain, if only because a page of it is still mapped.
domain_exists() {
    xl list | awk -v id=$1 '$2 == id { found = 1 } END { exit !found }'
}
# domain_is_gone DOMAIN: succeeds if the hypervisor does not have the domain.
domain_is_gone() {
    ! domain_exists $1
}

# nothing_left DOMAIN: succeeds if neither the domain, nor a mapped page of it, nor an event channel to it is left.
nothing_left() {
    domain_is_gone $1 && [ -z "$(grants_in_use $1)" ] && [ -z "$(channels_to $1)" ]
}
