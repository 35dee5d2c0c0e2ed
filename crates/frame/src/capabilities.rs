//! Egress capabilities of a port: frame lengths, blank checksums and super-packets that the port sends.

use ringfence_offload::GsoKind;

/// Length of an Ethernet header with one VLAN tag: the bytes of a frame beyond the MTU.
pub const LINK_HEADER_MAX: usize = 18;

/// Length of the longest super-packet in bytes, link header included: netif has a length field of 16
/// bits. Linux makes no longer ones.
pub const SUPER_FRAME_MAX: usize = 0xFFFF;

/// Blank checksums that a port sends without computing them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ChecksumOffload {
    /// No blank checksum.
    #[default]
    None,
    /// Blank checksums that netif marks with one bit: TCP and UDP at their standard offsets.
    Netif {
        /// Set for IPv4 (unless `feature-no-csum-offload`).
        ipv4: bool,
        /// Set for IPv6 (`feature-ipv6-csum-offload`).
        ipv6: bool,
    },
    /// Blank checksums at any offset (virtio-net header).
    Any,
}

/// Super-packets that a port sends whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GsoOffload {
    /// TCP over IPv4.
    pub tcp_v4: bool,
    /// TCP over IPv6.
    pub tcp_v6: bool,
    /// TCP segments with CWR set.
    pub ecn: bool,
    /// UDP segmentation offload.
    pub udp: bool,
}

impl GsoOffload {
    /// Returns true if the port sends super-packets of this kind whole.
    pub fn takes(self, kind: GsoKind, ecn: bool) -> bool {
        let known = match kind {
            GsoKind::TcpV4 => self.tcp_v4,
            GsoKind::TcpV6 => self.tcp_v6,
            GsoKind::Udp => self.udp,
            GsoKind::UdpFragment => false,
        };
        known && (self.ecn || !ecn)
    }
}

/// Egress capabilities of a port. They are constant while a worker owns the port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortCapabilities {
    /// Blank checksums that the port sends.
    pub checksum: ChecksumOffload,
    /// Super-packets that the port sends.
    pub gso: GsoOffload,
    /// Set if a frame can take several pieces at the receiver (`feature-sg`). Otherwise no frame is longer
    /// than the MTU, regardless of `gso`.
    pub scatter_gather: bool,
    /// Maximum number of bytes behind the Ethernet header of a frame on the wire.
    pub mtu: u16,
}

impl PortCapabilities {
    /// Makes the capabilities of a port without offloads, for frames of at most `mtu` bytes.
    pub const fn plain(mtu: u16) -> PortCapabilities {
        PortCapabilities {
            checksum: ChecksumOffload::None,
            gso: GsoOffload { tcp_v4: false, tcp_v6: false, ecn: false, udp: false },
            scatter_gather: false,
            mtu,
        }
    }

    /// Returns the maximum length in bytes of a frame that is no super-packet.
    pub fn frame_max(&self) -> usize {
        usize::from(self.mtu) + LINK_HEADER_MAX
    }

    /// Returns the maximum length in bytes of any frame.
    pub fn longest(&self) -> usize {
        let GsoOffload { tcp_v4, tcp_v6, udp, .. } = self.gso;
        if self.scatter_gather && (tcp_v4 || tcp_v6 || udp) {
            SUPER_FRAME_MAX.max(self.frame_max())
        } else {
            self.frame_max()
        }
    }
}
