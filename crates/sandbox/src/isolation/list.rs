//! Made by `cargo xtask syscalls` from the `#syscall` lines in the sources. Not to be edited.

use super::syscalls::{
    Allowed, CARD, DAEMON, DISK, DRIVER, FRONTEND, PROXY, SHIELD, UPLINK, has, is, is_whole, lacks,
    masked, on, own_pid,
};

/// The system calls that are allowed.
#[rustfmt::skip]
pub(super) const LIST: &[Allowed] = &[
    // driver/src/device_process.rs: hypervisors connect
    // driver/src/switch/domain.rs: launchers connect
    // driver/src/xen/status.rs: who asks for the status
    // nbd/src/export/server.rs: users of a disk connect
    // platform/src/local/hub/server.rs: domains connect
    // uplink/src/host/real/listen.rs: connections from outside, to forwarded ports
    // vhost-user/src/clients.rs: clients of a socket
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_accept4, &[]),
    // hostnet/src/netlink.rs: interfaces of the host
    // uplink/src/host/real/datagrams.rs: the guest's port, if it is free
    // uplink/src/host/real/outbound.rs: source address of the guest's connections
    on(UPLINK | DAEMON, libc::SYS_bind, &[]),
    // sandbox/src/isolation/syscalls.rs: the allocator
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_brk, &[]),
    // sandbox/src/isolation/syscalls.rs: timers
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_clock_getres, &[]),
    // block/src/blkback/worker.rs: the CPU time that a worker used; time, where the vDSO does not know it
    // sandbox/src/isolation/syscalls.rs: time, where the vDSO does not know it; CPU time and faults, for the figures
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_clock_gettime, &[]),
    // sandbox/src/isolation/syscalls.rs: sleeping
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_clock_nanosleep, &[]),
    // sandbox/src/isolation/syscalls.rs: threads; no processes, no namespaces (CLONE_NEW*)
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_clone, &[has(0, libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND), lacks(0, 0x7e02_0000)]),
    // sandbox/src/isolation/syscalls.rs: reaches the filter that answers ENOSYS, so that `clone` is used: its flags can be seen
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_clone3, &[]),
    // sandbox/src/isolation/syscalls.rs: done with a descriptor
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_close, &[]),
    // nbd/src/client/link.rs: a disk's server
    // platform/src/xen/device.rs: the store
    // uplink/src/host/real/datagrams.rs: peer of a flow
    // uplink/src/host/real/tcp.rs: connections that the guest opens
    on(UPLINK | DAEMON, libc::SYS_connect, &[]),
    // block/src/blkfront/mod.rs: the frontend of a disk waits
    // block/src/storage/file/uring.rs: a device with discards waits for its ring and for a thread
    // nbd/src/client/queue.rs: waiting for a server and for time
    // nbd/src/export/server.rs: the export waits for its clients
    // platform/src/local/hub/server.rs: the hub waits for its domains
    // platform/src/vhost.rs: waiting for calls and errors
    // switch/src/dataplane.rs: a worker waits for its ports
    // uplink/src/host/real/mod.rs: waiting for sockets
    // vhost-user/src/clients.rs: waiting for clients
    // vhost-user/src/shield/connection.rs: waiting for calls of one vring
    // vhost-user/src/shield/device.rs: waiting for a hypervisor, a driver and a backend
    // xenstore/src/pump.rs: the store waits for its clients
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | CARD | SHIELD, libc::SYS_epoll_create1, &[]),
    // block/src/blkfront/handle.rs: the frontend of a disk waits
    // block/src/blkfront/mod.rs: the frontend of a disk waits
    // block/src/storage/file/uring.rs: a device with discards waits for its ring and for a thread
    // link/src/stream.rs: waiting for room
    // nbd/src/client/queue.rs: waiting for a server and for time
    // nbd/src/client/queue/connection.rs: waiting for a server and for time
    // nbd/src/export/server.rs: the export waits for its clients
    // platform/src/local/hub/server.rs: the hub waits for its domains
    // platform/src/vhost.rs: waiting for calls and errors
    // switch/src/dataplane.rs: a worker waits for its ports
    // switch/src/dataplane/port_entry.rs: a port is added or removed
    // uplink/src/host/real/listen.rs: waiting for connections
    // uplink/src/host/real/mod.rs: waiting for sockets
    // vhost-user/src/clients.rs: waiting for clients
    // vhost-user/src/device/vrings.rs: waiting for kicks of a virtual machine
    // vhost-user/src/shield/connection.rs: waiting for calls of one vring
    // vhost-user/src/shield/device.rs: waiting for a hypervisor, a driver and a backend
    // vhost-user/src/shield/device/vrings.rs: calls of a backend
    // xenstore/src/pump.rs: the store waits for its clients
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | CARD | SHIELD, libc::SYS_epoll_ctl, &[]),
    // nbd/src/export/server.rs: the export waits for its clients
    // platform/src/local/hub/server.rs: the hub waits for its domains
    // platform/src/vhost.rs: waiting for calls and errors
    // switch/src/dataplane/idle.rs: a worker waits for its ports
    // uplink/src/host/real/mod.rs: waiting for sockets
    // vhost-user/src/clients.rs: kicks and messages of a virtual machine
    // vhost-user/src/shield/connection.rs: each call once
    // vhost-user/src/shield/device.rs: their events
    // xenstore/src/pump.rs: the store waits for its clients
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | CARD | SHIELD, libc::SYS_epoll_pwait, &[]),
    // nbd/src/export/server.rs: the export waits for its clients
    // platform/src/local/hub/server.rs: the hub waits for its domains
    // platform/src/vhost.rs: waiting for calls and errors
    // switch/src/dataplane/idle.rs: a worker waits for its ports
    // uplink/src/host/real/mod.rs: waiting for sockets
    // vhost-user/src/clients.rs: kicks and messages of a virtual machine
    // vhost-user/src/shield/connection.rs: each call once
    // vhost-user/src/shield/device.rs: their events
    // xenstore/src/pump.rs: the store waits for its clients
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | CARD | SHIELD, libc::SYS_epoll_pwait2, &[]),
    // sandbox/src/isolation/syscalls.rs: waiting, by the C library's older calls
    #[cfg(target_arch = "x86_64")]
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_epoll_wait, &[]),
    // block/src/blkback/worker.rs: a worker takes commands, and waits
    // block/src/storage/memory.rs: disks in memory; their memory is made before
    // block/src/storage/threads.rs: threads say what is done
    // nbd/src/client/dial.rs: a connection that was made is handed over
    // nbd/src/export/mod.rs: the export is told to end
    // platform/src/local/hub/server.rs: the hub's own bell
    // platform/src/vhost.rs: kicks and calls
    // switch/src/dataplane/handle.rs: a command is queued for a worker
    // sys/src/mailbox.rs: one thread wakes another
    // uplink/src/team.rs: frames are handed to another thread
    // vhost-user/src/device.rs: what the files of vrings are compared with
    // vhost-user/src/proxy/filter.rs: what the files of vrings are compared with
    // vhost-user/src/shield/connection.rs: kicks and calls between the shield and a backend
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_eventfd2, &[]),
    // sandbox/src/isolation/syscalls.rs: end of a thread, of the process
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_exit, &[]),
    // sandbox/src/isolation/syscalls.rs: end of a thread, of the process
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_exit_group, &[]),
    // block/src/storage/file/facts.rs: whether ranges can be given up
    // block/src/storage/file/pool.rs: a guest gives up ranges of its disk
    // block/src/storage/memory.rs: disks in memory; their memory is made before
    // block/src/storage/qcow2/file.rs: clusters that are zeroed or given up, and flushes
    // driver/src/xen/records.rs: records of queues
    // platform/src/local/hub/broker.rs: what is left of a domain that is gone is punched out
    // platform/src/local/pages.rs: revoking: punching pages out of one's own arena
    on(DRIVER | FRONTEND | DAEMON | DISK | CARD, libc::SYS_fallocate, &[]),
    // sandbox/src/channel.rs: a second handle
    // vhost-user/src/shield/connection.rs: descriptors of the pool and of eventfds for the backend
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_fcntl, &[is(1, libc::F_DUPFD_CLOEXEC)]),
    // sandbox/src/isolation/syscalls.rs: descriptor flags
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_fcntl, &[is(1, libc::F_GETFD)]),
    // block/src/storage/file/facts.rs: O_DIRECT
    // platform/src/local/arena.rs: whether an arena is open for writing
    // xenstore/src/transport.rs: O_NONBLOCK
    on(DRIVER | FRONTEND | DAEMON | CARD, libc::SYS_fcntl, &[is(1, libc::F_GETFL)]),
    // platform/src/local/arena.rs: an arena's exact seals
    // vhost-user/src/memory.rs: a file of a hypervisor that cannot shrink
    // vhost-user/src/proxy/pool.rs: kind of a file that a hypervisor hands over
    on(DRIVER | FRONTEND | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_fcntl, &[is(1, libc::F_GET_SEALS)]),
    // sys/src/byte_lock.rs: whether QEMU uses a disk
    on(DAEMON, libc::SYS_fcntl, &[is(1, libc::F_OFD_GETLK)]),
    // sys/src/byte_lock.rs: the locks by which QEMU knows that a disk is in use
    on(DAEMON, libc::SYS_fcntl, &[is(1, libc::F_OFD_SETLK)]),
    // sandbox/src/isolation/syscalls.rs: descriptor flags
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_fcntl, &[is(1, libc::F_SETFD)]),
    // block/src/storage/file/facts.rs: O_DIRECT
    // xenstore/src/transport.rs: O_NONBLOCK
    on(DAEMON, libc::SYS_fcntl, &[is(1, libc::F_SETFL)]),
    // uplink/src/host/real/relay.rs: longer pipes of relays
    on(UPLINK, libc::SYS_fcntl, &[is(1, libc::F_SETPIPE_SZ)]),
    // block/src/storage/file/pool.rs: a guest flushes its disk
    // block/src/storage/qcow2/file.rs: clusters that are zeroed or given up, and flushes
    // block/src/storage/qcow2/order.rs: the order of tables and counts of an image
    on(DRIVER | DAEMON | DISK, libc::SYS_fdatasync, &[]),
    // block/src/storage/below.rs: the overlay that was put on a file
    on(DAEMON, libc::SYS_fgetxattr, &[]),
    // block/src/storage/file/lock.rs: that nobody else has a disk
    on(DAEMON, libc::SYS_flock, &[]),
    // block/src/storage/below.rs: the image above a file that an overlay was put on
    // block/src/storage/file/facts.rs: what a disk is, and on what
    // block/src/storage/file/growth.rs: how large a disk is now
    // block/src/storage/file/lock.rs: the mark of the process that serves a disk
    // block/src/storage/qcow2/chain.rs: the files of an image
    // block/src/storage/qcow2/file.rs: how long the file of an image is
    // driver/src/xen/records.rs: records of queues
    // platform/src/local/arena.rs: an arena's exact size
    on(DRIVER | FRONTEND | DAEMON | DISK | CARD, libc::SYS_fstat, &[]),
    // block/src/storage/file/facts.rs: what a disk is, and on what
    // driver/src/xen/disks/opener.rs: whether a disk is on another machine
    // platform/src/local/arena.rs: that an arena is on tmpfs
    on(DRIVER | FRONTEND | DAEMON | CARD, libc::SYS_fstatfs, &[]),
    // block/src/storage/file/growth.rs: a disk that an administrator enlarges
    // driver/src/xen/records.rs: records of queues
    on(DAEMON, libc::SYS_ftruncate, &[]),
    // sandbox/src/isolation/syscalls.rs: locks, joining threads
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_futex, &[]),
    // link/src/datagram.rs: finding out that the socket of a virtual machine is connected
    // nbd/src/client/link.rs: a disk's server
    // uplink/src/host/real/datagrams.rs: address of the peer
    on(UPLINK | DAEMON, libc::SYS_getpeername, &[]),
    // sandbox/src/isolation/syscalls.rs: abort
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_getpid, &[]),
    // sandbox/src/isolation/syscalls.rs: hash tables; domain keys
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_getrandom, &[]),
    // sandbox/src/isolation/syscalls.rs: time, where the vDSO does not know it; CPU time and faults, for the figures
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_getrusage, &[]),
    // nbd/src/client/link.rs: finding a server by its name (the C library)
    // uplink/src/host/real/datagrams.rs: port of the socket
    on(UPLINK | DAEMON, libc::SYS_getsockname, &[]),
    // uplink/src/host/real/datagrams.rs: options in force
    on(UPLINK, libc::SYS_getsockopt, &[is(1, libc::IPPROTO_IP)]),
    // uplink/src/host/real/datagrams.rs: options in force
    on(UPLINK, libc::SYS_getsockopt, &[is(1, libc::IPPROTO_IPV6)]),
    // uplink/src/host/real/tcp.rs: state of a connection
    on(UPLINK, libc::SYS_getsockopt, &[is(1, libc::IPPROTO_TCP)]),
    // driver/src/switch/domain.rs: the user of a connection
    // nbd/src/client/host.rs: whether there is one
    // platform/src/local/hub/server.rs: the credentials of who connects
    // sandbox/src/channel.rs: the type of a channel
    // sys/src/descriptors/disposal.rs: the cookie of a socket, which identifies the peer
    // sys/src/descriptors/stream.rs: the family of a socket
    // sys/src/socket.rs: SO_MEMINFO: room in a socket
    // uplink/src/host/real/datagrams.rs: errors
    // uplink/src/host/real/tcp.rs: errors
    // uplink/src/relay.rs: address family of a socket
    // uplink/src/udp/relay.rs: address family and type of a socket
    // vhost-user/src/device.rs: the type of a socket for requests
    // vhost-user/src/proxy/filter.rs: the type of a socket for requests
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_getsockopt, &[is(1, libc::SOL_SOCKET)]),
    // sandbox/src/isolation/syscalls.rs: locks; abort
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_gettid, &[]),
    // sys/src/event_signal.rs: interrupts of a virtual machine that cannot block
    on(UPLINK | DISK | CARD | SHIELD, libc::SYS_io_destroy, &[]),
    // sys/src/event_signal.rs: results of these interrupts
    on(UPLINK | DISK | CARD | SHIELD, libc::SYS_io_getevents, &[]),
    // sys/src/event_signal.rs: interrupts of a virtual machine that cannot block
    on(UPLINK | DISK | CARD | SHIELD, libc::SYS_io_setup, &[]),
    // sys/src/event_signal.rs: interrupts of a virtual machine; reads and writes of files that are open
    on(UPLINK | DISK | CARD | SHIELD, libc::SYS_io_submit, &[]),
    // memory/src/uring.rs: disks; the ring allows what the list does (`pool.rs`)
    on(DRIVER | DAEMON | DISK, libc::SYS_io_uring_enter, &[lacks(3, 0xffff_fffe_u32.cast_signed()), is_whole(4, 0)]),
    // platform/src/xen/abi.rs: evtchn: allocating
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x0004_4502)]),
    // platform/src/xen/abi.rs: evtchn: unbinding
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x0004_4503)]),
    // platform/src/xen/abi.rs: evtchn: notifying
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x0004_4504)]),
    // platform/src/xen/abi.rs: evtchn: binding
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x0008_4501)]),
    // platform/src/xen/abi.rs: gntdev: unmapping
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x0010_4701)]),
    // platform/src/xen/abi.rs: gntalloc: taking back
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x0010_4706)]),
    // platform/src/xen/abi.rs: gntdev, gntalloc: notice of unmapping
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x0010_4707)]),
    // platform/src/xen/abi.rs: gntdev: copying
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x0010_4708)]),
    // platform/src/xen/abi.rs: gntdev: mapping
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x0018_4700)]),
    // platform/src/xen/abi.rs: gntalloc: lending
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x0018_4705)]),
    // block/src/storage/file/facts.rs: BLKSSZGET: how large its sectors are
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x1268)]),
    // sys/src/blkdev.rs: BLKDISCARD: giving up ranges of a block device
    on(DRIVER | DAEMON | DISK, libc::SYS_ioctl, &[is(1, 0x1277)]),
    // block/src/storage/file/facts.rs: BLKPBSZGET: how large those of its medium are
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x127b)]),
    // sys/src/blkdev.rs: BLKSECDISCARD: the same, for certain
    on(DRIVER | DAEMON, libc::SYS_ioctl, &[is(1, 0x127d)]),
    // sys/src/tap.rs: TUNSETIFF: a TAP
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x4004_54ca)]),
    // sys/src/tap.rs: TUNSETPERSIST: that it outlives the daemon
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x4004_54cb)]),
    // sys/src/tap.rs: TUNSETOFFLOAD: what is left to the reader
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x4004_54d0)]),
    // sys/src/tap.rs: TUNSETSNDBUF: that nothing is held back
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x4004_54d4)]),
    // sys/src/tap.rs: TUNSETVNETHDRSZ: headers of 12 bytes
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x4004_54d8)]),
    // sys/src/tap.rs: TUNSETVNETLE: little-endian ones
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x4004_54dc)]),
    // platform/src/vhost.rs: VHOST_NET_SET_BACKEND: taking its queues away from vhost-net
    on(UPLINK, libc::SYS_ioctl, &[is(1, 0x4008_af30)]),
    // platform/src/xen/abi/window.rs: grant windows: issuing
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x4010_7743)]),
    // platform/src/xen/abi/window.rs: grant windows: revoking
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x4010_7744)]),
    // platform/src/xen/abi.rs: evtchn: after an overflow
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x4505)]),
    // sys/src/socket.rs: SIOCOUTQ: payload in a socket's send queue
    on(UPLINK, libc::SYS_ioctl, &[is(1, 0x5411)]),
    // nbd/src/client/link.rs: FIONREAD: finding a server by its name (the C library)
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x541b)]),
    // driver/src/switch/domain.rs: FIONBIO: O_NONBLOCK of a new listening socket
    // nbd/src/export/mod.rs: FIONBIO: O_NONBLOCK, as the standard library sets it
    // platform/src/local/hub/server.rs: FIONBIO: O_NONBLOCK
    // sandbox/src/isolation/syscalls.rs: FIONBIO: O_NONBLOCK, as the standard library sets it
    // uplink/src/host/real/listen.rs: FIONBIO: O_NONBLOCK
    on(DRIVER | FRONTEND | UPLINK | DAEMON, libc::SYS_ioctl, &[is(1, 0x5421)]),
    // sys/src/blkdev.rs: BLKGETSIZE64: how large a block device is
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x8008_1272_u32.cast_signed())]),
    // sys/src/socket.rs: SIOCATMARK: the mark of urgent data
    on(UPLINK, libc::SYS_ioctl, &[is(1, 0x8905)]),
    // hostnet/src/netlink.rs: SIOCGIFINDEX: the number of an interface
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0x8933)]),
    // platform/src/vhost.rs: VHOST_GET_VRING_BASE: how far it has come
    on(UPLINK, libc::SYS_ioctl, &[is(1, 0xc008_af12_u32.cast_signed())]),
    // platform/src/xen/abi/window.rs: grant windows: creating, for each backend
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0xc00c_7741_u32.cast_signed())]),
    // platform/src/xen/abi/window.rs: grant windows: registering
    on(DAEMON, libc::SYS_ioctl, &[is(1, 0xc010_7742_u32.cast_signed())]),
    // driver/src/xen/config/error.rs: the configuration, read again
    on(DAEMON, libc::SYS_lseek, &[]),
    // block/src/storage/extents.rs: SEEK_END, whether a disk was truncated
    on(DRIVER, libc::SYS_lseek, &[is(2, 2)]),
    // block/src/storage/extents.rs: SEEK_DATA, where a disk has holes
    // block/src/storage/qcow2/disk.rs: SEEK_DATA, where a raw backing file has holes
    on(DRIVER, libc::SYS_lseek, &[is(2, 3)]),
    // block/src/storage/extents.rs: SEEK_HOLE, where a disk has holes
    // block/src/storage/qcow2/disk.rs: SEEK_HOLE, where a raw backing file has holes
    on(DRIVER, libc::SYS_lseek, &[is(2, 4)]),
    // platform/src/local/pages.rs: whether a punched page has left the file
    on(DRIVER | FRONTEND | CARD, libc::SYS_lseek, &[is(2, libc::SEEK_DATA)]),
    // memory/src/mapping.rs: lent memory stays out of core files
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_madvise, &[is(2, libc::MADV_DONTDUMP)]),
    // sandbox/src/isolation/syscalls.rs: the allocator; stacks of old threads
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_madvise, &[is(2, libc::MADV_DONTNEED)]),
    // sandbox/src/isolation/syscalls.rs: the allocator
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_madvise, &[is(2, libc::MADV_FREE)]),
    // sandbox/src/isolation/syscalls.rs: undoing other advice
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_madvise, &[is(2, libc::MADV_NORMAL)]),
    // memory/src/mapping.rs: touching pages ahead of use
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_madvise, &[is(2, libc::MADV_POPULATE_READ)]),
    // memory/src/mapping.rs: touching pages ahead of use
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_madvise, &[is(2, libc::MADV_POPULATE_WRITE)]),
    // memory/src/mapping.rs: mapping lent memory and rings; reserving addresses
    // sandbox/src/isolation/syscalls.rs: the allocator; stacks
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_mmap, &[lacks(2, libc::PROT_EXEC)]),
    // sandbox/src/isolation/syscalls.rs: guard pages; the allocator
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_mprotect, &[lacks(2, libc::PROT_EXEC)]),
    // memory/src/mapping.rs: giving mappings back
    // sandbox/src/isolation/syscalls.rs: the allocator
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_munmap, &[]),
    // sandbox/src/isolation/syscalls.rs: sleeping
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_nanosleep, &[]),
    // sandbox/src/isolation/syscalls.rs: fstat, as newer C libraries do it
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_newfstatat, &[has(3, libc::AT_EMPTY_PATH)]),
    // driver/src/xen/config/error.rs: whether a file is there
    on(DAEMON, libc::SYS_newfstatat, &[lacks(3, libc::AT_EMPTY_PATH)]),
    // driver/src/xen/config/error.rs: the same, by a library that knows the older call
    #[cfg(target_arch = "x86_64")]
    on(DAEMON, libc::SYS_open, &[]),
    // block/src/storage/below.rs: the image above a file that an overlay was put on
    // block/src/storage/file/facts.rs: the disks of guests that come
    // block/src/storage/file/lock.rs: the mark of the process that serves a disk
    // block/src/storage/folders.rs: disks, and the folders on the way to them
    // block/src/storage/qcow2/chain.rs: the files of an image
    // driver/src/xen/bridge.rs: /sys, and TAPs
    // driver/src/xen/config/error.rs: the configuration, read again
    // driver/src/xen/records.rs: records of queues
    // platform/src/xen/device.rs: devices of Xen, as guests come
    // sys/src/tap.rs: a TAP for a guest that comes
    on(DAEMON, libc::SYS_openat, &[]),
    // uplink/src/host/real/relay.rs: pipes of relays
    on(UPLINK, libc::SYS_pipe2, &[]),
    // sandbox/src/isolation/syscalls.rs: waiting, by the C library's older calls
    // sys/src/poll.rs: a thread sleeps until a file is ready
    #[cfg(target_arch = "x86_64")]
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_poll, &[]),
    // block/src/blkback/worker.rs: a worker takes commands, and waits
    // block/src/blkfront/handle.rs: the frontend of a disk waits
    // block/src/blkfront/mod.rs: the frontend of a disk waits
    // driver/src/machine/process.rs: waiting for hypervisors, the storage and the session
    // driver/src/pool_proxy/process.rs: waiting for hypervisors, the backend and the session
    // driver/src/shield/process.rs: waiting for hypervisors, a driver, the backend and the session
    // nbd/src/client/host.rs: waiting for a connection
    // nbd/src/client/mod.rs: waiting for a server's greeting
    // platform/src/local/hub/client.rs: waiting for the hub
    // platform/src/vhost.rs: waiting for calls and errors
    // sys/src/poll.rs: a thread sleeps until a file is ready
    // sys/src/pressure.rs: pressure on the system's memory
    // uplink/src/host/real/tcp.rs: urgent data, end of the stream
    // uplink/src/runner.rs: waiting for the guest and for sockets
    // vhost-user/src/proxy/notices.rs: requests of a backend while an answer is awaited
    // vhost-user/src/proxy/relay.rs: readiness of the sockets of a relay
    // vhost-user/src/shield/connection.rs: an answer of the backend
    // xenstore/src/client.rs: waiting for the store
    // xenstore/src/pump.rs: the store waits for its clients
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_ppoll, &[]),
    // sandbox/src/isolation/syscalls.rs: PR_GET_AUXV: rustix asks where the vDSO is
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_prctl, &[is(0, 0x4155_5856)]),
    // sandbox/src/isolation/syscalls.rs: start of a thread: its name, for who looks at it in `ps`
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_prctl, &[is(0, libc::PR_SET_NAME)]),
    // block/src/storage/below.rs: its header
    // block/src/storage/file/facts.rs: the signature of a disk image
    // block/src/storage/qcow2_header.rs: the header of an image
    // memory/src/iolist.rs: grant copies; from a disk to lent pages
    // vhost-user/src/proxy/pool.rs: mark of a pool
    on(DRIVER | FRONTEND | DAEMON | DISK | PROXY | CARD, libc::SYS_pread64, &[]),
    // block/src/storage/qcow2/executor.rs: clusters of an image, from and to private memory
    // memory/src/iolist.rs: grant copies; from a disk to lent pages
    on(DRIVER | FRONTEND | DAEMON | DISK | CARD, libc::SYS_preadv, &[]),
    // sandbox/src/isolation/syscalls.rs: reading a limit of its own, setting none
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_prlimit64, &[is(0, 0), is_whole(2, 0)]),
    // memory/src/iolist.rs: grant copies; from lent pages to a disk
    on(DRIVER | FRONTEND | DAEMON | DISK | CARD, libc::SYS_pwrite64, &[]),
    // block/src/storage/qcow2/executor.rs: clusters of an image, from and to private memory
    // memory/src/iolist.rs: grant copies; from lent pages to a disk
    on(DRIVER | FRONTEND | DAEMON | DISK | CARD, libc::SYS_pwritev, &[]),
    // block/src/blkback/worker.rs: a worker takes commands, and waits
    // block/src/storage/threads.rs: threads say what is done
    // frame/src/tap.rs: frames from and to a TAP
    // nbd/src/client/dial.rs: a connection that was made is handed over
    // nbd/src/client/queue/connection.rs: how long a server may take
    // nbd/src/client/tls.rs: what TLS has made of requests
    // platform/src/local/hub/server.rs: the hub's own bell
    // platform/src/vhost.rs: kicks and calls
    // platform/src/xen/channel.rs: which event channels had events
    // switch/src/dataplane/idle.rs: a worker waits for its ports
    // sys/src/mailbox.rs: one thread wakes another
    // uplink-process/src/egress/document.rs: another policy
    // uplink/src/team.rs: frames are handed to another thread
    // xenstore/src/transport.rs: the store's device
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_read, &[]),
    // block/src/storage/folders.rs: where a disk is, when all links are followed
    #[cfg(target_arch = "x86_64")]
    on(DAEMON, libc::SYS_readlink, &[]),
    // block/src/storage/folders.rs: where a disk is, when all links are followed
    on(DAEMON, libc::SYS_readlinkat, &[]),
    // memory/src/iolist.rs: frames in several parts, into lent pages
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_readv, &[]),
    // hostnet/src/netlink.rs: interfaces of the host
    // link/src/datagram.rs: frames on a datagram socket
    // link/src/stream.rs: frames on a stream socket
    // nbd/src/client/tls.rs: what TLS has made of requests
    // sys/src/descriptors/message.rs: taking a message that was looked at out of the queue
    // sys/src/descriptors/stream.rs: bytes
    // sys/src/socket.rs: dropping what the guest acknowledged
    // uplink/src/host/real/own.rs: rtnetlink: the host's own addresses
    // vhost-user/src/messages.rs: payload of a message
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_recvfrom, &[]),
    // sys/src/datagrams.rs: datagrams, many at a time
    on(UPLINK, libc::SYS_recvmmsg, &[]),
    // platform/src/local/hub/protocol.rs: messages of the hub, with descriptors
    // sandbox/src/channel.rs: orders and reports, with descriptors
    // sys/src/datagrams.rs: errors, and datagrams one at a time
    // sys/src/descriptors/disposal.rs: what is left in the queue of a socket that is disposed of
    // sys/src/descriptors/message.rs: a message with its descriptors, or a look at it
    // sys/src/descriptors/stream.rs: a look at bytes that may come with descriptors
    // uplink/src/host/real/tcp.rs: peeking; data of the guest
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_recvmsg, &[]),
    // sandbox/src/isolation/syscalls.rs: the kernel goes on with a wait after SIGSTOP and SIGCONT
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_restart_syscall, &[]),
    // sandbox/src/isolation/syscalls.rs: start of a thread
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_rseq, &[]),
    // sandbox/src/isolation/syscalls.rs: start of a thread; abort; stack overflow
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_rt_sigaction, &[]),
    // sandbox/src/isolation/syscalls.rs: start of a thread; abort; stack overflow
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_rt_sigprocmask, &[]),
    // sandbox/src/isolation/syscalls.rs: return from a signal handler
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_rt_sigreturn, &[]),
    // sandbox/src/isolation/syscalls.rs: start of a thread: the C library looks at its stack; how many threads pay
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_sched_getaffinity, &[]),
    // block/src/blkback/worker.rs: polling threads let others run
    // sandbox/src/isolation/syscalls.rs: locks of libraries spin
    // switch/src/dataplane.rs: a worker that polls lets others run
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_sched_yield, &[]),
    // nbd/src/client/link.rs: finding a server by its name (the C library)
    on(DAEMON, libc::SYS_sendmmsg, &[]),
    // link/src/stream.rs: frames on a stream socket
    // memory/src/iolist.rs: what goes from lent pages into a socket
    // platform/src/local/hub/protocol.rs: messages of the hub, with descriptors
    // sandbox/src/channel.rs: orders and reports, with descriptors
    // sys/src/datagrams.rs: errors, and datagrams one at a time
    // uplink/src/host/real/tcp.rs: peeking; data of the guest
    // vhost-user/src/messages.rs: the file of an in-flight log for a hypervisor
    // vhost-user/src/proxy/end.rs: a message of a hypervisor or its backend, with its descriptors
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_sendmsg, &[]),
    // hostnet/src/netlink.rs: interfaces of the host
    // link/src/datagram.rs: frames on a datagram socket
    // memory/src/iolist.rs: what goes from lent pages into a socket
    // nbd/src/client/tls.rs: what TLS has made of requests
    // sys/src/descriptors/stream.rs: bytes
    // uplink/src/host/real/datagrams.rs: datagrams to the peer of the socket
    // uplink/src/host/real/own.rs: rtnetlink: the host's own addresses
    // uplink/src/host/real/tcp.rs: first bytes of a connection under an egress policy; bytes that waited for room
    // vhost-user/src/device.rs: a change of the configuration space
    // vhost-user/src/messages.rs: answers to a hypervisor
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_sendto, &[]),
    // sandbox/src/isolation/syscalls.rs: start of a thread
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_set_robust_list, &[]),
    // uplink/src/host/real/datagrams.rs: message filter
    on(UPLINK, libc::SYS_setsockopt, &[is(1, libc::IPPROTO_ICMPV6)]),
    // sys/src/datagrams.rs: errors and destination of a datagram
    // uplink/src/host/real/datagrams.rs: hop limit, traffic class and DF of a datagram
    // uplink/src/host/real/outbound.rs: a port that is chosen by the connection
    // uplink/src/host/real/tcp.rs: traffic class of a connection
    on(UPLINK, libc::SYS_setsockopt, &[is(1, libc::IPPROTO_IP)]),
    // sys/src/datagrams.rs: errors and destination of a datagram
    // uplink/src/host/real/datagrams.rs: hop limit, traffic class and fragmentation of a datagram
    // uplink/src/host/real/tcp.rs: traffic class of a connection
    on(UPLINK, libc::SYS_setsockopt, &[is(1, libc::IPPROTO_IPV6)]),
    // uplink/src/host/real/tcp.rs: options of TCP
    on(UPLINK, libc::SYS_setsockopt, &[is(1, libc::IPPROTO_TCP)]),
    // nbd/src/client/link.rs: requests are not held back
    on(DAEMON, libc::SYS_setsockopt, &[is(1, libc::IPPROTO_TCP), is(2, libc::TCP_NODELAY)]),
    // sys/src/datagrams.rs: segmentation of datagrams
    on(UPLINK, libc::SYS_setsockopt, &[is(1, libc::IPPROTO_UDP)]),
    // driver/src/xen/status.rs: SO_RCVTIMEO: a client that is slow
    on(DAEMON, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, 0x14)]),
    // driver/src/xen/status.rs: SO_SNDTIMEO: a client that is slow
    on(DAEMON, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, 0x15)]),
    // driver/src/xen/status.rs: SO_RCVTIMEO after 2038: a client that is slow
    on(DAEMON, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, 0x42)]),
    // driver/src/xen/status.rs: SO_SNDTIMEO after 2038: a client that is slow
    on(DAEMON, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, 0x43)]),
    // sys/src/descriptors/stream.rs: SO_PASSRIGHTS: no descriptors may be sent to this end
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, 0x53)]),
    // uplink/src/host/real/datagrams.rs: interface of questions to multicast groups
    // uplink/src/host/real/outbound.rs: interface of the guest's connections
    on(UPLINK, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_BINDTODEVICE)]),
    // nbd/src/client/link.rs: noticing that a server is gone
    // uplink/src/host/real/tcp.rs: dead peers
    on(UPLINK | DAEMON, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_KEEPALIVE)]),
    // sys/src/descriptors/disposal.rs: a socket that a peer sent closes at once
    // uplink/src/host/real/tcp.rs: resets
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_LINGER)]),
    // uplink/src/host/real/tcp.rs: urgent data
    on(UPLINK, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_OOBINLINE)]),
    // sys/src/socket.rs: peeking on from where the last peek ended
    on(UPLINK, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_PEEK_OFF)]),
    // uplink/src/host/real/datagrams.rs: bounding a socket's queue
    on(UPLINK, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_RCVBUF)]),
    // platform/src/local/hub/server.rs: bounding what a peer can make the kernel hold
    // uplink/src/host/real/datagrams.rs: bounding a socket's queue
    on(DRIVER | UPLINK, libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_SNDBUF)]),
    // sandbox/src/isolation/syscalls.rs: telling a peer that there is no more
    // sys/src/descriptors/disposal.rs: the peer of a socket that is disposed of sees the end at once
    // uplink/src/host/real/tcp.rs: the guest has closed its direction
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_shutdown, &[]),
    // sandbox/src/isolation/syscalls.rs: start and end of a thread: stack overflow is reported
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_sigaltstack, &[]),
    // nbd/src/client/link.rs: a disk's server, and finding it by its name
    on(DAEMON, libc::SYS_socket, &[is(0, libc::AF_INET)]),
    // uplink/src/host/real/datagrams.rs: UDP, echo
    on(UPLINK, libc::SYS_socket, &[is(0, libc::AF_INET), masked(1, 0xf, libc::SOCK_DGRAM)]),
    // uplink/src/host/real/tcp.rs: TCP
    on(UPLINK, libc::SYS_socket, &[is(0, libc::AF_INET), masked(1, 0xf, libc::SOCK_STREAM)]),
    // nbd/src/client/link.rs: a disk's server, and finding it by its name
    on(DAEMON, libc::SYS_socket, &[is(0, libc::AF_INET6)]),
    // uplink/src/host/real/datagrams.rs: UDP, echo
    on(UPLINK, libc::SYS_socket, &[is(0, libc::AF_INET6), masked(1, 0xf, libc::SOCK_DGRAM)]),
    // uplink/src/host/real/tcp.rs: TCP
    on(UPLINK, libc::SYS_socket, &[is(0, libc::AF_INET6), masked(1, 0xf, libc::SOCK_STREAM)]),
    // hostnet/src/netlink.rs: interfaces of the host
    on(DAEMON, libc::SYS_socket, &[is(0, libc::AF_NETLINK)]),
    // nbd/src/client/link.rs: a disk's server
    // platform/src/xen/device.rs: the store
    on(DAEMON, libc::SYS_socket, &[is(0, libc::AF_UNIX)]),
    // platform/src/local/hub/server.rs: event channels, store connections
    on(DRIVER, libc::SYS_socketpair, &[is(0, libc::AF_UNIX)]),
    // uplink/src/host/real/relay.rs: relays between two sockets
    on(UPLINK, libc::SYS_splice, &[]),
    // sandbox/src/isolation/syscalls.rs: fstat, as the standard library does it
    // sys/src/descriptors/mod.rs: which device a peer sent
    // sys/src/descriptors/mod.rs: which file a peer sent
    // vhost-user/src/memory.rs: size of a virtual machine's memory
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_statx, &[has(2, libc::AT_EMPTY_PATH)]),
    // block/src/storage/file/facts.rs: whether a file is there
    on(DAEMON, libc::SYS_statx, &[lacks(2, libc::AT_EMPTY_PATH)]),
    // sandbox/src/isolation/syscalls.rs: abort
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_tgkill, &[own_pid(0)]),
    // nbd/src/client/queue.rs: how long a server may take
    on(DRIVER | DAEMON | DISK, libc::SYS_timerfd_create, &[]),
    // nbd/src/client/queue/connection.rs: how long a server may take
    on(DRIVER | DAEMON | DISK, libc::SYS_timerfd_settime, &[]),
    // nbd/src/client/link.rs: finding a server by its name (the C library)
    on(DAEMON, libc::SYS_uname, &[]),
    // driver/src/xen/records.rs: records of queues
    // driver/src/xen/status.rs: the socket is taken away
    #[cfg(target_arch = "x86_64")]
    on(DAEMON, libc::SYS_unlink, &[]),
    // driver/src/xen/records.rs: records of queues
    // driver/src/xen/status.rs: the socket is taken away
    on(DAEMON, libc::SYS_unlinkat, &[]),
    // block/src/blkback/worker.rs: a worker takes commands, and waits
    // block/src/storage/threads.rs: threads say what is done
    // frame/src/tap.rs: frames from and to a TAP
    // hostnet/src/log.rs: the log on standard error
    // link/src/capture.rs: frames that are captured
    // link/src/tap.rs: frames to a TAP
    // nbd/src/client/dial.rs: a connection that was made is handed over
    // nbd/src/export/mod.rs: the export is told to end
    // platform/src/local/hub/server.rs: the hub's own bell
    // platform/src/vhost.rs: kicks and calls
    // platform/src/xen/channel.rs: which event channels had events
    // switch/src/dataplane/handle.rs: a command is queued for a worker
    // switch/src/dataplane/handoff.rs: another worker is woken
    // sys/src/mailbox.rs: one thread wakes another
    // uplink/src/team.rs: frames are handed to another thread
    // xenstore/src/transport.rs: the store's device
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_write, &[]),
    // memory/src/iolist.rs: frames in several parts, from lent pages
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_writev, &[]),
];

/// System calls that libraries try, and that are refused: the libraries have another way.
#[rustfmt::skip]
pub(super) const REFUSED: &[Allowed] = &[
    // sandbox/src/isolation/syscalls.rs: the allocator tries it for a large buffer that grows, and copies
    on(DRIVER | FRONTEND | UPLINK | DAEMON | DISK | PROXY | CARD | SHIELD, libc::SYS_mremap, &[]),
    // sandbox/src/isolation/syscalls.rs: how many processors there are: a control group may say; else all
    on(DRIVER | FRONTEND | UPLINK | DISK | PROXY | CARD | SHIELD, libc::SYS_openat, &[]),
];
