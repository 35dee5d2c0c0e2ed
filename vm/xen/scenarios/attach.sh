# title: `ringfence attach` in a guest, served by `ringfence serve`
# set: core
# machine: xen
# limit: 60

use_ringfence
attached
gone one
complete
