"""The wheels of ``dsops-prebuilt`` itself: the loader alone, and the loader with the portable tier of one machine."""

from dsops_builder.core.build import CoreBuilder, build_core
from dsops_builder.core.loader import check_loader

__all__ = ["CoreBuilder", "build_core", "check_loader"]
