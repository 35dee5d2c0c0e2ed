//! Validation of a peer's offload flags: converts netif's two checksum bits and its segmentation request to
//! metadata.

use ringfence_offload::OffloadMeta;
use ringfence_offload::accept::{Refusal, accept};
use ringfence_offload::blank::{NetifChecksum, from_netif, reset_pseudo_header};
use ringfence_offload::packet::{Layers, Network};
use ringfence_wire::netif::{Checksum, extra};

use crate::features::{OffloadKeys, gso_from_extra};
use crate::rules::{rx_gso_rule, tx_gso_rule};

/// Parsed offload flags of a packet, not yet validated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offered {
    pub(crate) checksum: Checksum,
    pub(crate) gso: Option<extra::Gso>,
}

/// Reasons for which offload flags are refused.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Refused {
    /// Blank checksum at an offset that netif does not define.
    Blank,
    /// Blank checksum that this end does not accept.
    NotNegotiated,
    /// Segmentation request for a frame with unparsable headers.
    Headers,
    /// Segmentation request that breaks a rule.
    Gso(Refusal),
}

impl Refused {
    /// Returns the rule name for a packet from a guest.
    pub(crate) fn tx_rule(self) -> &'static str {
        match self {
            Refused::Blank => "tx_bad_checksum_blank",
            Refused::NotNegotiated => "tx_checksum_not_negotiated",
            Refused::Headers => "tx_gso_bad_headers",
            Refused::Gso(refusal) => tx_gso_rule(&refusal),
        }
    }

    /// Returns the rule name for a packet from a backend.
    pub(crate) fn rx_rule(self) -> &'static str {
        match self {
            Refused::Blank => "rx_bad_checksum_blank",
            Refused::NotNegotiated => "rx_checksum_not_negotiated",
            Refused::Headers => "rx_gso_bad_headers",
            Refused::Gso(refusal) => rx_gso_rule(&refusal),
        }
    }
}

impl Offered {
    /// Returns true if no offload is requested.
    pub(crate) fn is_plain(&self) -> bool {
        !self.checksum.blank && self.gso.is_none()
    }

    /// Returns the metadata of a frame of `total` bytes from a guest. `headers` are its first bytes. The
    /// function writes the correct pseudo-header sum into a blank checksum field.
    ///
    /// Blank checksums over IPv4 are accepted even if this end announced `feature-no-csum-offload`: Linux's
    /// netfront ignores that key, and a refusal would only drop its packets. Egress processing computes them.
    pub(crate) fn accept_from_guest(
        &self,
        own: OffloadKeys,
        headers: &mut [u8],
        total: usize,
    ) -> Result<OffloadMeta, Refused> {
        let layers = self.layers(headers, total)?;
        let own = OffloadKeys { checksum_ipv4: true, ..own };
        let offered = self.metadata(own, &layers)?;
        if self.checksum.blank {
            reset_pseudo_header(headers, &layers).map_err(|_| Refused::Blank)?;
        }
        accept(offered, headers, &layers).map_err(Refused::Gso)
    }

    /// Returns the metadata of a frame from a backend. A blank checksum under an IPv6 routing header, which
    /// cannot be reset, is accepted.
    pub(crate) fn accept_from_backend(
        &self,
        own: OffloadKeys,
        headers: &mut [u8],
        total: usize,
    ) -> Result<OffloadMeta, Refused> {
        let layers = self.layers(headers, total)?;
        let offered = self.metadata(own, &layers)?;
        accept(offered, headers, &layers).map_err(Refused::Gso)
    }

    fn layers(&self, headers: &[u8], total: usize) -> Result<Layers, Refused> {
        let refused = if self.gso.is_some() { Refused::Headers } else { Refused::Blank };
        let total = u32::try_from(total).map_err(|_| refused)?;
        Layers::parse(headers, total).map_err(|_| refused)
    }

    fn metadata(&self, own: OffloadKeys, layers: &Layers) -> Result<OffloadMeta, Refused> {
        let Checksum { blank, validated } = self.checksum;
        let bits = NetifChecksum { blank, validated };
        let checksum = from_netif(bits, layers).map_err(|_| Refused::Blank)?;
        let taken = match layers.network() {
            Network::Ipv4(_) => own.checksum_ipv4,
            Network::Ipv6(_) => own.checksum_ipv6,
            Network::Arp | Network::Other(_) => true,
        };
        if blank && !taken {
            return Err(Refused::NotNegotiated);
        }
        let gso = self.gso.map(gso_from_extra);
        Ok(OffloadMeta { checksum, gso })
    }
}
