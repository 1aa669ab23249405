// The one translation unit that holds fmt's out-of-line code. Distributions ship fmt as headers and
// a shared library; inlining the former everywhere costs four seconds of compile time a file,
// linking the latter would tie the binary to one distribution's ABI. So the implementation header
// is compiled once, hidden, into the library (fmt 9 and 10; see CMakeLists).
#include <fmt/format-inl.h>

#include <locale>

#if !defined(FMT_HEADER_ONLY)
FMT_BEGIN_NAMESPACE
namespace detail {

template FMT_API auto dragonbox::to_decimal(float x) noexcept -> dragonbox::decimal_fp<float>;
template FMT_API auto dragonbox::to_decimal(double x) noexcept -> dragonbox::decimal_fp<double>;
template FMT_API locale_ref::locale_ref(const std::locale& loc);
template FMT_API auto locale_ref::get<std::locale>() const -> std::locale;
template FMT_API auto thousands_sep_impl(locale_ref) -> thousands_sep_result<char>;
template FMT_API auto decimal_point_impl(locale_ref) -> char;
template FMT_API void buffer<char>::append(const char*, const char*);
template FMT_API void vformat_to(buffer<char>&, string_view,
                                 basic_format_args<buffer_context<char>>, locale_ref);

}  // namespace detail
FMT_END_NAMESPACE
#endif
