//! What a vif's peer says of a frame beside its bytes, and what of that is accepted: netif's two
//! checksum bits and its segmentation order, made metadata.

use ringfence_offload::OffloadMeta;
use ringfence_offload::accept::{Refusal, accept};
use ringfence_offload::blank::{NetifChecksum, from_netif, reset_pseudo_header};
use ringfence_offload::packet::{Layers, Network};
use ringfence_wire::netif::{Checksum, extra};

use crate::features::{OffloadKeys, order_of};
use crate::rules::{rx_gso_rule, tx_gso_rule};

/// As it came, already parsed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offered {
    pub(crate) checksum: Checksum,
    pub(crate) gso: Option<extra::Gso>,
}

/// Why it is not accepted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Refused {
    /// A blank checksum where netif has no place for one.
    Blank,
    /// A blank checksum that this end did not say it takes.
    NotNegotiated,
    /// A segmentation order for a frame whose headers do not parse.
    Headers,
    /// A segmentation order that breaks a rule.
    Gso(Refusal),
}

impl Refused {
    /// For the guest that sent it.
    pub(crate) fn tx_rule(self) -> &'static str {
        match self {
            Refused::Blank => "tx_bad_checksum_blank",
            Refused::NotNegotiated => "tx_checksum_not_negotiated",
            Refused::Headers => "tx_gso_bad_headers",
            Refused::Gso(refusal) => tx_gso_rule(&refusal),
        }
    }

    /// For the backend that sent it.
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
    /// Whether nothing has to be done to the frame.
    pub(crate) fn is_plain(&self) -> bool {
        !self.checksum.blank && self.gso.is_none()
    }

    /// Metadata of a frame of `total` bytes that begins with `headers`, from a guest. A blank checksum
    /// gets a right pseudo-header sum, whatever the guest put there.
    ///
    /// Over IPv4 it is taken whether it was announced or not: Linux's netfront leaves those sums blank
    /// whatever `feature-no-csum-offload` says, and loses nothing but the packets if that is refused. It
    /// is finished where the frame leaves.
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

    /// Metadata of a frame from a backend, which may leave blank what cannot be reset: a sum under an
    /// IPv6 routing header.
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
        let gso = self.gso.map(order_of);
        Ok(OffloadMeta { checksum, gso })
    }
}
